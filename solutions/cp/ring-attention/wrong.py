"""Typical wrong answers and lazy cheats of the exercises on ring attention."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "zigzag, contiguous, forward_bytes, backward_bytes, hops = "
_WHOLE = """
def ring_forward(q, k, v, where, attend):
    rank, size = comm.get_rank(), comm.get_world_size()
    blocks = [torch.empty(2, len(held), q.shape[1], dtype=q.dtype) for held in where]
    blocks[rank].copy_(torch.stack((k, v)))
    for step in range(size - 1):
        source = (rank - step) % size
        works = [comm.isend(blocks[source], (rank + 1) % size), comm.irecv(blocks[source - 1], (rank - 1) % size)]
        [work.wait() for work in works]
    k, v = torch.cat(blocks, 1)
    hidden = torch.cat(where) > where[rank][:, None]
    for _ in range(size):
        out, lse = attend(q, k, v, hidden)
    return out, lse
"""

TYPICAL = {
    "ring_attention-1": {
        "all ranks": Bad(_PREDICT + "528, 228, 1536, 5632, 4", "of all four ranks"),
        "contiguous is even": Bad(_PREDICT + "132, 132, 1536, 5632, 4", "the others wait"),
        "keys alone": Bad(_PREDICT + "132, 228, 768, 5632, 4", "values too"),
        "gradients one hop short": Bad(_PREDICT + "132, 228, 1536, 4608, 4", "they come home"),
        "three hops": Bad(_PREDICT + "132, 228, 1536, 5632, 3", "not on its own rank"),
    },
    "ring_attention-2": {
        "adds up": Bad([("out + weight * (block_out - out)", "out + block_out")], "out, number 0"),
        "averages": Bad([("weight * (block_out - out)", "0.5 * (block_out - out)")], "out, number 0"),
        "plain exponentials": Bad(
            [("torch.logaddexp(lse, block_lse)", "(lse.exp() + block_lse.exp()).log()")], "large scores"
        ),
        "waits first": Bad(
            [
                (
                    "        hidden = where",
                    "        for work in works:\n            work.wait()\n        hidden = where",
                )
            ],
            "is it under way meanwhile",
        ),
        "local positions": Bad(
            [
                (
                    "where[source] > where[rank][:, None]",
                    "(torch.arange(len(where[source])) > torch.arange(len(where[rank]))[:, None]) & (source == rank)",
                )
            ],
            "rank 0: out, number",
        ),
        "equal blocks": Bad([("len(where[source - 1])", "len(where[rank])")], "5 positions on 2"),
        "the last one too": Bad([("if step < size - 1:", "if size > 1:")], "bytes, and"),
    },
    "ring_attention-3": {
        "zigzag of the whole": Bad(
            "ranks = [[3 * r, 3 * r + 1, 3 * r + 2, 21 - 3 * r, 22 - 3 * r, 23 - 3 * r] for r in range(4)]",
            "the critical path is 75, the budget 46",
        ),
        "stripes": Bad("ranks = [list(range(r, 24, 4)) for r in range(4)]", "the critical path is 52"),
        "uneven ranks": Bad(
            "ranks = [list(range(12)), list(range(12, 16)), list(range(16, 20)), list(range(20, 24))]",
            "room for 6 positions, and one would hold 12",
        ),
        "forgets one": Bad("ranks = [list(range(1, 7)), [7], [8], [9]]", "position 0 is on 0 ranks"),
    },
    "ring_attention-4": {
        "as it was": Bad(
            [("found = [(out, lse)] * len(blocks)", "pass")],
            "its weights add up to 1 in every block",
        ),
        "the LSE alone": Bad(
            [("found = [(out, lse)] * len(blocks)", "found = [(own, lse) for own, _ in found]")],
            "what is subtracted from dP is a sum over the keys of all blocks",
        ),
        "outputs added": Bad([("(own - base).exp()[:, None] * part", "part")], "dK of block 0, number"),
        "no guard": Bad([("base = lse.masked_fill(lse == -torch.inf, 0)", "base = lse")], "a query may see nothing"),
        "plain exponentials": Bad(
            [("torch.stack([own for _, own in found]).logsumexp(0)", "sum(own.exp() for _, own in found).log()")],
            "large scores",
        ),
        "the largest LSE": Bad([(".logsumexp(0)", ".amax(0)")], "dV of block 0, number"),
        "the last LSE": Bad(
            [("torch.stack([own for _, own in found]).logsumexp(0)", "found[-1][1]")], "dV of block 0, number"
        ),
    },
    "ring_attention-5": {
        "the page's order": Bad(
            "def part_of(tokens, lengths, layout, rank):\n"
            "    labels = shard(next_token_labels(tokens), layout, rank)\n"
            "    return shard(tokens, layout, rank), labels, positions(layout, rank)",
            "right if the sequence is a single document",
        ),
        "labels after": Bad(
            [("shard(labels, layout, rank)", "next_token_labels(shard(tokens, layout, rank))")], "labels are"
        ),
        "labels across documents": Bad(
            [("    labels[:, torch.tensor(lengths).cumsum(0) - 1] = -100\n", "")],
            "right if the sequence is a single document",
        ),
        "the first token of the next": Bad([("cumsum(0) - 1]", "cumsum(0)[:-1]]")], "labels are"),
        "local positions": Bad([("where[held]", "torch.arange(len(held))")], "positions are"),
        "positions of the sequence": Bad([("where[held]", "held")], "positions are"),
    },
    "ring_attention-6": {
        "block-local LSE": Bad(
            [
                (
                    "(scale * q @ k.T - lse[:, None]).exp().masked_fill(hidden, 0)",
                    "(scale * q @ k.T).masked_fill(hidden, -torch.inf).softmax(1).nan_to_num(0)",
                )
            ],
            "The weights of a query add up to 1 over the keys of all ranks",
        ),
        "block-local D": Bad(
            [("(do @ v.T - delta)", "(do @ v.T - (p * (do @ v.T)).sum(1, keepdim=True))")],
            "look at what is subtracted from dP",
        ),
        "own average for D": Bad(
            [
                (
                    "(do @ v.T - delta)",
                    "(do @ v.T - ((p * (do @ v.T)).sum(1) / p.sum(1).clamp(min=1e-300))[:, None])",
                )
            ],
            "look at what is subtracted from dP",
        ),
        "powers before they are divided": Bad(
            [("(scale * q @ k.T - lse[:, None]).exp()", "((scale * q @ k.T).exp() / lse.exp()[:, None])")],
            "large scores",
        ),
        "one hop short": Bad(
            [("        block = pass_on(block)", "        block = pass_on(block) if step < size - 1 else block")],
            "that is the gradient of rank",
        ),
        "no mask": Bad([(".masked_fill(hidden, 0)", "")], "The weights of a query"),
        "scaled twice": Bad([("dk += ds.T @ q", "dk += scale * ds.T @ q")], "dK, number 0"),
        "gradients stay where they are made": Bad(
            [("        block = pass_on(block)", "        block = torch.cat([pass_on(block[:2].clone()), block[2:]])")],
            "dV, number",
        ),
        "last block wins": Bad([("dq += ds @ k", "dq = ds @ k")], "dQ stays at home"),
    },
}

CHEATS = {
    "ring_attention-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "zigzag = contiguous = forward_bytes = backward_bytes = hops = Anything()",
            "must be a whole number",
        ),
    },
    "ring_attention-2": {
        "gathers first": Bad(_WHOLE, "is it under way meanwhile"),
        "the library's own": Bad(
            """
def ring_forward(q, k, v, where, attend):
    from dualpipe_lab.cp.layouts import make_layout
    from dualpipe_lab.cp.ring_attention import ring_attention
    layout = make_layout("contiguous", sum(map(len, where)), comm.get_world_size())
    return ring_attention(q[None, None], k[None, None], v[None, None], layout)[0, 0], q[:, 0]
""",
            "the library's own is switched off",
        ),
    },
    "ring_attention-3": {
        "twice the same": Bad("ranks = [list(range(6))] * 4", "position 0 is on 4 ranks"),
        "nothing": Bad("ranks = [[], [], [], []]", "position 0 is on 0 ranks"),
    },
    "ring_attention-4": {
        "nothing": Bad(
            "def gradients(do, q, blocks, found, block_backward):\n"
            "    return torch.zeros_like(q), [(torch.zeros_like(k), torch.zeros_like(v)) for k, v, _ in blocks]",
            "dV of block 0, number",
        ),
        "autograd": Bad(
            """
def gradients(do, q, blocks, found, block_backward):
    q = q.clone().requires_grad_()
    pairs = [(k.clone().requires_grad_(), v.clone().requires_grad_()) for k, v, _ in blocks]
    s = torch.cat([(q @ k.T * q.shape[1] ** -0.5).masked_fill(b[2], -torch.inf) for (k, _), b in zip(pairs, blocks)], 1)
    s = s.masked_fill((s == -torch.inf).all(1, keepdim=True), -1e300)
    (s.softmax(1) @ torch.cat([v for _, v in pairs]) * do).sum().backward()
    return q.grad, [(k.grad, v.grad) for k, v in pairs]
""",
            "the exercise is to write this yourself",
        ),
    },
    "ring_attention-5": {
        "one rank": Bad(
            "def part_of(tokens, lengths, layout, rank):\n"
            "    return tokens, next_token_labels(tokens), torch.arange(tokens.shape[1])",
            "ids are",
        ),
    },
    "ring_attention-6": {
        "gathers everything": Bad(
            """
def ring_backward(do, q, k, v, out, lse, where):
    rank, scale = comm.get_rank(), q.shape[1] ** -0.5
    parts = comm.all_gather_object((k, v))
    keys, values = (torch.cat([part[i] for part in parts]) for i in range(2))
    p = (scale * q @ keys.T - lse[:, None]).exp().masked_fill(torch.cat(where) > where[rank][:, None], 0)
    ds = scale * p * (do @ values.T - (do * out).sum(1, keepdim=True))
    dk, dv = ds.T @ q, p.T @ do
    comm.all_reduce(dk)
    comm.all_reduce(dv)
    own = slice(rank * len(k), (rank + 1) * len(k))
    return ds @ keys, dk[own], dv[own]
""",
            "the exercise is to do it with send and recv",
        ),
    },
}
