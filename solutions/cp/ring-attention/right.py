"""Right answers of another style to the exercises on ring attention."""

RIGHT = {
    "ring_attention-2": {
        "sums and maxima": """
def ring_forward(q, k, v, where, attend):
    rank, N = comm.get_rank(), comm.get_world_size()
    held = torch.cat([k, v], 1)
    m, l, A = torch.full_like(q[:, 0], -torch.inf), torch.zeros_like(q[:, 0]), torch.zeros_like(q)
    for i in range(N):
        owner = (rank - i) % N
        works = []
        if i + 1 < N:
            arriving = held.new_zeros(len(where[(owner - 1) % N]), held.shape[1])
            works = [comm.irecv(arriving, (rank + N - 1) % N), comm.isend(held, (rank + 1) % N)]
        mask = where[rank].unsqueeze(1) < where[owner].unsqueeze(0)
        o, lse = attend(q, held[:, : q.shape[1]], held[:, q.shape[1] :], mask)
        new = torch.maximum(m, lse)
        safe = new.masked_fill(new == -torch.inf, 0)
        a, b = (m - safe).exp(), (lse - safe).exp()
        m, l, A = new, a * l + b, a[:, None] * A + b[:, None] * o
        for work in works:
            work.wait()
        if works:
            held = arriving
    return A / l[:, None], m + l.log()
""",
        "merged at the end": """
def ring_forward(q, k, v, where, attend):
    rank, size = comm.get_rank(), comm.get_world_size()
    found, k, v = [], k.contiguous(), v.contiguous()
    for step in range(size):
        source = (rank - step) % size
        works = []
        if step != size - 1:
            others = len(where[(source - 1) % size])
            next_k, next_v = q.new_empty(others, q.shape[1]), q.new_empty(others, q.shape[1])
            for mine, theirs in ((k, next_k), (v, next_v)):
                works.append(comm.isend(mine, (rank + 1) % size))
                works.append(comm.irecv(theirs, (rank - 1) % size))
        found.append(attend(q, k, v, where[source][None] > where[rank][:, None]))
        [work.wait() for work in works]
        if works:
            k, v = next_k, next_v
    lses = torch.stack([lse for _, lse in found])
    weights = lses.softmax(0)[..., None]
    return (weights * torch.stack([out for out, _ in found])).sum(0), lses.logsumexp(0)
""",
    },
    "ring_attention-3": {
        "one tensor, unordered": """
ranks = torch.stack([torch.tensor([23 - r, 16 + r, 2 * r, 15 - 2 * r, 2 * r + 1, 14 - 2 * r]) for r in range(4)])
""",
        "an array": """
import numpy as np
r = np.arange(4)[:, None]
ranks = np.concatenate([2 * r, 2 * r + 1, 14 - 2 * r, 15 - 2 * r, 16 + r, 23 - r], 1)
""",
    },
    "ring_attention-4": {
        "merged two by two": """
def gradients(do, q, blocks, found, block_backward):
    out, lse = found[0]
    for more, own in found[1:]:
        total = torch.logaddexp(lse, own)
        share = torch.where(total == -torch.inf, 0.0, (own - total).exp())[:, None]
        out, lse = out + share * (more - out), total
    parts = [block_backward(do, q, k, v, out, lse, hidden) for k, v, hidden in blocks]
    return sum(dq for dq, _, _ in parts), [(dk, dv) for _, dk, dv in parts]
""",
        "weights by a softmax, and without the kernel": """
def gradients(do, q, blocks, found, block_backward):
    scale = q.shape[1] ** -0.5
    outs, lses = torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
    delta = (do * (lses.softmax(0).nan_to_num(0)[..., None] * outs).sum(0)).sum(1, keepdim=True)
    dq, others = 0, []
    for k, v, hidden in blocks:
        s = (scale * q @ k.T).masked_fill(hidden, -torch.inf)
        p = (s - lses.logsumexp(0)[:, None].nan_to_num(0, neginf=0)).exp()
        ds = scale * p * (do @ v.T - delta)
        dq = dq + ds @ k
        others.append((ds.T @ q, p.T @ do))
    return dq, others
""",
    },
    "ring_attention-5": {
        "positions index the sequence": """
def part_of(tokens, lengths, layout, rank):
    held = positions(layout, rank)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    begins = torch.tensor([0, *lengths]).cumsum(0)[document]
    is_last = torch.cat([document[1:] != document[:-1], torch.tensor([True])])
    labels = tokens.roll(-1, 1).masked_fill(is_last, -100)
    return tokens[:, held], labels[:, held], (torch.arange(len(begins)) - begins)[held]
""",
        "document by document": """
def part_of(tokens, lengths, layout, rank):
    labels = torch.cat([next_token_labels(document) for document in tokens.split(lengths, 1)], 1)
    where = torch.tensor([place for length in lengths for place in range(length)]).expand_as(tokens)
    ids, labels, where = (shard_sequence(x, layout, rank) for x in (tokens, labels, where))
    return ids, labels, where[0]
""",
    },
    "ring_attention-6": {
        "gradients are one step behind": """
def ring_backward(do, q, k, v, out, lse, where):
    rank, size = comm.get_rank(), comm.get_world_size()
    D = torch.einsum("sd,sd->s", do, out)
    kv, dq, grads = torch.stack([k, v]), 0, None
    for step in range(size):
        mask = where[rank].unsqueeze(1) >= where[(rank - step) % size].unsqueeze(0)
        s = torch.where(mask, q @ kv[0].T / q.shape[1] ** 0.5, -torch.inf)
        p = torch.exp(s - lse.unsqueeze(1))
        ds = p * (do @ kv[1].T - D.unsqueeze(1)) / q.shape[1] ** 0.5
        dq = dq + ds @ kv[0]
        own = torch.stack([ds.T @ q, p.T @ do])
        grads = own if grads is None else pass_on(grads) + own
        if step < size - 1:
            kv = pass_on(kv)
    dk, dv = pass_on(grads)
    return dq, dk, dv
""",
        "gradients straight home": """
def ring_backward(do, q, k, v, out, lse, where):
    rank, size = comm.get_rank(), comm.get_world_size()
    scale, works = q.shape[1] ** -0.5, []
    kv, dq, total = torch.stack((k, v)), torch.zeros_like(q), torch.zeros(2, *k.shape, dtype=k.dtype)
    for step in range(size):
        owner = (rank - step) % size
        p = torch.exp((scale * q @ kv[0].T).masked_fill(where[owner] > where[rank][:, None], -torch.inf) - lse[:, None])
        ds = scale * p * (do @ kv[1].T - (do * out).sum(1)[:, None])
        dq += ds @ kv[0]
        own = torch.stack((ds.T @ q, p.T @ do))
        if step == 0:
            total += own
        else:
            works.append((own, comm.isend(own, owner, tag=1)))
        if step < size - 1:
            kv = pass_on(kv)
    for step in range(1, size):
        came = torch.empty_like(total)
        comm.irecv(came, (rank + step) % size, tag=1).wait()
        total += came
    for _, work in works:
        work.wait()
    return dq, total[0], total[1]
""",
    },
}
