"""Typical wrong answers and lazy cheats of the exercises on grouped-query attention."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "key_head, held, cached, for_copies = "

TYPICAL = {
    "gqa-1": {
        "dealt out in turn": Bad(_PREDICT + "0, 1280, 128, 5120", "neighbours share"),
        "half a head": Bad(_PREDICT + "1, 640, 128, 5120", "never half of one"),
        "nothing to sum": Bad(_PREDICT + "1, 1280, 128, 0", "another rank holds the same"),
    },
    "gqa-2": {
        "dealt out in turn": Bad(
            [("range(rank * size, (rank + 1) * size)", "range(rank, num_heads, num_ranks)")],
            "rank 0 of 2, 4 query heads and 1 KV head(s): query heads [0, 2]",
        ),
        "KV head modulo": Bad(
            [("range(queries[0] // group, queries[-1] // group + 1)", "sorted({i % num_kv_heads for i in queries})")],
            "while query heads [0, 1] read 1",
        ),
        "always alone": Bad([("max(num_ranks // num_kv_heads, 1)", "1")], "rank 1 reads the same KV heads"),
    },
    "gqa-3": {
        "copies forgotten": Bad([("if copies is not None", "if False")], "the ranks have partial sums"),
        "over all ranks": Bad([("group=copies", "group=None")], "4 rank(s), 4 query and 2 KV head(s): rank 0: dk"),
        "averaged": Bad([("(dk, group=copies)", '(dk, "avg", group=copies)')], "dk is 0.5 times"),
    },
    "gqa-4": {
        "averages": Bad(
            [("(weight.grad, group=layer.replicas)", '(weight.grad, "avg", group=layer.replicas)')],
            "W_k has moved 0.5 times as far",
        ),
        "keys alone": Bad(
            [("(layer.k.weight, layer.v.weight)", "(layer.k.weight,)")], "copies of the same rows of W_v"
        ),
        "every weight": Bad(
            [("(layer.k.weight, layer.v.weight)", "layer.parameters()")], "2 rank(s), 2 query and 1 KV head(s)"
        ),
    },
}

CHEATS = {
    "gqa-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "key_head = held = cached = for_copies = Anything()", "must be a whole number"
        ),
    },
    "gqa-2": {
        "everything everywhere": Bad(
            "def heads_of(rank, num_ranks, num_heads, num_kv_heads):\n"
            "    return range(num_heads), range(num_kv_heads), range(num_ranks)",
            "rank 0 of 2, 2 query heads and 1 KV head(s): query heads [0, 1]",
        ),
    },
    "gqa-3": {
        "the library's own": Bad(
            """
def projections_backward(d_queries, d_keys, d_values, x, q, k, v, copies):
    from dualpipe_lab.tp.linear import fused_column_linear
    from dualpipe_lab.tp.shard import TensorParallel
    leaves = [t.clone().requires_grad_() for t in (x, q, k, v)]
    outs = fused_column_linear(leaves[0], leaves[1:], TensorParallel(), [None, copies, copies])
    torch.autograd.backward(outs, (d_queries, d_keys, d_values))
    return [t.grad for t in leaves]
""",
            "the library's own is switched off",
        ),
    },
    "gqa-4": {
        "learns nothing": Bad("def step(layer, optimizer, microbatches):\n    pass", "W_k has moved 0 times as far"),
    },
}
