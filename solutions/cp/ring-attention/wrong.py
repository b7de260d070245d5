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
    },
    "ring_attention-2": {
        "adds up": Bad([("out + weight * (block_out - out)", "out + block_out")], "out, number 0"),
        "equal blocks": Bad([("len(where[source - 1])", "len(where[rank])")], "5 positions on 2"),
        "the last one too": Bad([("if step < size - 1:", "if size > 1:")], "bytes, and"),
    },
    "ring_attention-3": {
        "zigzag of the whole": Bad(
            "ranks = [[3 * r, 3 * r + 1, 3 * r + 2, 21 - 3 * r, 22 - 3 * r, 23 - 3 * r] for r in range(4)]",
            "the critical path is 75, the budget 46",
        ),
        "stripes": Bad("ranks = [list(range(r, 24, 4)) for r in range(4)]", "the critical path is 52"),
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
        "no guard": Bad([("base = lse.masked_fill(lse == -torch.inf, 0)", "base = lse")], "a query may see nothing"),
    },
    "ring_attention-5": {
        "labels across documents": Bad(
            [("    labels[:, torch.tensor(lengths).cumsum(0) - 1] = -100\n", "")],
            "right if the sequence is a single document",
        ),
        "the first token of the next": Bad([("cumsum(0) - 1]", "cumsum(0)[:-1]]")], "labels are"),
        "local positions": Bad([("where[held]", "torch.arange(len(held))")], "positions are"),
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
        "one hop short": Bad(
            [("        block = pass_on(block)", "        block = pass_on(block) if step < size - 1 else block")],
            "that is the gradient of rank",
        ),
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
    },
    "ring_attention-3": {
        "twice the same": Bad("ranks = [list(range(6))] * 4", "position 0 is on 4 ranks"),
    },
    "ring_attention-4": {
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
