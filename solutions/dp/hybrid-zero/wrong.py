"""Typical wrong answers and lazy cheats of the exercises on hybrid ZeRO."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "inside, to_others, flat_out, held"
PLAN = "stage, shard_ranks, num_microbatches"
ONE_GROUP = """
def sum_in_two_levels(x, node, across):
    comm.all_reduce(x)
"""
TWO_ALL_REDUCES = """
def sum_in_two_levels(x, node, across):
    comm.all_reduce(x, group=node)
    comm.all_reduce(x, group=across)
"""
NO_PADDING = """
def sum_in_two_levels(x, node, across):
    shard = x.new_zeros(x.numel() // comm.get_world_size(node))
    comm.reduce_scatter_single(shard, x, group=node)
    comm.all_reduce(shard, group=across)
    comm.all_gather_single(x, shard, group=node)
"""

TYPICAL = {
    "hybrid_zero-1": {
        "flat inside": Bad(f"{NAMES} = 13_500, 360, 13_500, 4", "the gathers stay in a node"),
        "the whole model across": Bad(f"{NAMES} = 10_800, 1_440, 13_500, 4", "each sums its shard"),
        "every microbatch across": Bad(f"{NAMES} = 10_800, 1_800, 13_500, 4", "once per step"),
        "every rank leaves": Bad(f"{NAMES} = 10_800, 360, 54_000, 4", "a ring leaves a node at one of its ranks"),
        "flat state": Bad(f"{NAMES} = 10_800, 360, 13_500, 1", "16 / 16 is flat ZeRO-3"),
    },
    "hybrid_zero-2": {
        "two all-reduces": Bad(TWO_ALL_REDUCES, "first sum inside the node"),
        "no padding": Bad(NO_PADDING, "2 node(s) of 2 rank(s), 5 numbers"),
        "forgets the other nodes": Bad(
            [("    comm.all_reduce(shard, group=across)\n", "")], "the sum over its own node"
        ),
        "not in place": Bad([("x.copy_(padded[: x.numel()])", "x = padded[: x.numel()]")], "x has not changed"),
    },
    "hybrid_zero-3": {
        "in float32": Bad([("    return shard", "    return shard.float()")], "a result is torch.float32"),
        "the whole gradient across": Bad(
            """
def mean_shard(grad, node, across):
    g = grad / comm.get_world_size()
    comm.all_reduce(g)
    return g.chunk(comm.get_world_size(node))[comm.get_rank(node)].clone()
""",
            "bytes inside its node, 16 are enough",
        ),
        "an all-reduce inside": Bad(
            """
def mean_shard(grad, node, across):
    g = grad / comm.get_world_size()
    comm.all_reduce(g, group=node)
    own = g.chunk(comm.get_world_size(node))[comm.get_rank(node)].clone()
    comm.all_reduce(own, group=across)
    return own
""",
            "bytes inside its node",
        ),
        "divides grad in place": Bad(
            [("grad / (N_in", "grad.div_(N_in"), ("* N_out), group", "* N_out), group")], "grad has changed"
        ),
        "one level too few": Bad([("/ (N_in * N_out)", "/ N_in")], "or not divided by 2: the wrong group"),
        "the sum": Bad([("grad / (N_in * N_out)", "grad")], "the number of ranks: it was summed"),
        "not a number": Bad([("    return shard", "    return shard * float('nan')")], "has [nan, nan]"),
        "twice by hand": Bad([("    return shard", "    return shard / N_out")], "or divided by 2 once too often"),
    },
    "hybrid_zero-4": {
        "flat ZeRO-1": Bad(f'{PLAN} = "zero1", 32, 4', "sends for 620 ms"),
        "hybrid ZeRO-3": Bad(f'{PLAN} = "zero3", 8, 2', "sends for 270 ms"),
        "small microbatches": Bad(f'{PLAN} = "zero2", 8, 8', "sends for 375 ms"),
        "no room": Bad(f'{PLAN} = "zero1", 8, 8', "22 GB for weights, gradients and state and 3 GB"),
        "a single sequence": Bad(f'{PLAN} = "zero1", 8, 16', "too small"),
    },
}

CHEATS = {
    "hybrid_zero-1": {
        "equal to everything": Bad(EQUAL_TO_ALL + "inside = to_others = flat_out = held = Anything()", "whole number")
    },
    "hybrid_zero-2": {
        "one all-reduce": Bad(ONE_GROUP, "to other nodes"),
        "nothing": Bad("def sum_in_two_levels(x, node, across):\n    pass", "x has not changed"),
    },
    "hybrid_zero-3": {
        "returns what came": Bad("def mean_shard(grad, node, across):\n    return grad", "expected its shard, 2 of"),
        "a constant": Bad("def mean_shard(grad, node, across):\n    return grad[:2] * 0 + 1", "has [1.0, 1.0]"),
    },
    "hybrid_zero-4": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "stage = shard_ranks = num_microbatches = Anything()", "a stage is one"
        ),
        "no ranks": Bad(f'{PLAN} = "zero2", 0, 4', "a divisor of 32"),
        "no microbatches": Bad(f'{PLAN} = "zero2", 8, 0', "a divisor of 16"),
    },
}
