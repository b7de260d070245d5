"""Typical wrong answers and lazy cheats of the exercises on layers of experts."""

from bad_answer import Bad

TYPICAL = {
    "smoe-5": {
        "experts in the order of arrival": Bad(
            [("repeat_interleave(arriving)", "repeat_interleave(arriving).sort().values")],
            "rows met experts in the order of their arrival",
        ),
        "results by expert": Bad(
            [("[torch.cat(note.rows).argsort()]", "")], "results went back in the order of experts"
        ),
        "weights by token": Bad([("weights.flatten()[note.order]", "weights.flatten()")], "the weights lie by token"),
        "experts without rows left out": Bad(
            [
                (
                    "zip(note.rows, experts, strict=True)\n    ]",
                    "zip(note.rows, experts, strict=True) if len(own)\n    ]",
                )
            ],
            "has the gradient None",
        ),
    },
    "smoe-3": {
        "regrouped there only": Bad([("    rows = rows[major.argsort()]\n", "")], "other experts' results"),
        "as it was": Bad(
            [("    rows = rows[major]\n", ""), ("    rows = rows[major.argsort()]\n", "")], "2 rank(s), 4 experts"
        ),
    },
}

CHEATS = {
    "smoe-5": {
        "products that nobody can put off": Bad(
            [("linear(rows[own], up)", "(rows[own] @ up.t())")], "products of weights are linear of column"
        ),
        "rows twice as wide": Bad(
            [
                ("(rows_of(x, note), note.sends", "(rows_of(x, note).repeat(1, 2), note.sends"),
                ("compute(there, note", "compute(there[:, : x.shape[1]], note"),
            ],
            "are enough for counts, its rows for others' experts and the results of others' rows",
        ),
    },
    "smoe-3": {
        "gathers the experts": Bad(
            """
def layer(x, experts, weights, num_experts):
    every = weights.new_empty(comm.get_world_size() * len(weights), *weights.shape[1:])
    comm.all_gather_single(every, weights.contiguous())
    return torch.einsum("tkoi,ti->to", every[experts], x)
""",
            "no expert travels",
        ),
        "stays at home": Bad(
            "def layer(x, experts, weights, num_experts):\n"
            "    return x * (experts % len(weights) + 1).sum(1, keepdim=True)",
            "2 rank(s), 2 experts",
        ),
    },
}
