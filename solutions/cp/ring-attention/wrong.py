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
        "plain exponentials": Bad(
            [("torch.logaddexp(lse, block_lse)", "(lse.exp() + block_lse.exp()).log()")], "large scores"
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
        "the page's order": Bad(
            "def part_of(tokens, lengths, layout, rank):\n"
            "    labels = shard_sequence(next_token_labels(tokens), layout, rank)\n"
            "    return shard_sequence(tokens, layout, rank), labels, positions(layout, rank)",
            "right if the sequence is a single document",
        ),
        "labels after": Bad(
            [("shard_sequence(labels, layout, rank)", "next_token_labels(shard_sequence(tokens, layout, rank))")],
            "labels are",
        ),
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
        "powers before they are divided": Bad(
            [("(scale * q @ k.T - lse[:, None]).exp()", "((scale * q @ k.T).exp() / lse.exp()[:, None])")],
            "large scores",
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
        "nothing": Bad(
            "def gradients(do, q, blocks, found, block_backward):\n"
            "    return torch.zeros_like(q), [(torch.zeros_like(k), torch.zeros_like(v)) for k, v, _ in blocks]",
            "dV of block 0, number",
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
