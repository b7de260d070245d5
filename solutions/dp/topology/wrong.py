"""Typical wrong answers and lazy cheats of the exercises on topology."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "dp, next_along_dp, next_along_pp, num_model_groups"

TYPICAL = {
    "topology-1": {
        "read from the left": Bad(f"{NAMES} = 0, 20, 19, 3", "reads the list from the left"),
        "tp's neighbour": Bad(f"{NAMES} = 1, 19, 6, 3", "neighbour along tp"),
        "off the end": Bad(f"{NAMES} = 1, 22, 30, 3", "the world ends at 23"),
    },
    "topology-2": {
        "strides from the wrong side": Bad([("axes[place + 1 :]", "axes[:place]")], "rank 0 is in"),
        "one stride for all": Bad([("stride * i for i", "i for i")], "exactly one group"),
        "in the order of the names": Bad(
            [
                (
                    "    return [tuple(",
                    "    if along[0] != [name for name, _ in axes if name in along][0]:\n"
                    "        return [tuple(first + offset for offset in offsets(True)[::-1]) "
                    "for first in offsets(False)]\n    return [tuple(",
                )
            ],
            "list each in the order of its ranks",
        ),
    },
    "topology-3": {
        "tp across nodes": Bad(
            [('[("dp", 4), ("pp", 4), ("tp", 4)]', '[("dp", 4), ("tp", 4), ("pp", 4)]')], "tp 12,288 S"
        ),
        "pp outermost": Bad('axes = [("pp", 4), ("dp", 4), ("tp", 4)]', "2,112 S cross"),
        "weights that do not fit": Bad('axes = [("dp", 8), ("tp", 8)]', "weights of 24 S"),
    },
    "topology-4": {
        "only the stride": Bad(
            [
                (
                    "    for first in range(world_size):\n        if first // stride % size == 0:\n",
                    "    if True:\n        if True:\n            first = rank - rank // stride % size * stride\n",
                ),
            ],
            "every rank must make all groups",
        ),
        "only the groups": Bad(
            [("axes[place + 1 :]", "axes[:place]")], "has the sum over ranks [0, 1], expected ranks [0, 2]"
        ),
        "the whole world": Bad(
            "def sum_along(x, axes, axis):\n    comm.all_reduce(x)",
            "has the sum over ranks [0, 1, 2, 3], expected ranks [0, 2]",
        ),
    },
}

CHEATS = {
    "topology-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "dp = next_along_dp = next_along_pp = num_model_groups = Anything()", "whole number"
        )
    },
    "topology-2": {
        "the library's own": Bad(
            "def groups(axes, along):\n    return sorted(lab.Topology(axes).groups(*along))", "switched off"
        ),
    },
    "topology-3": {
        "equal to everything": Bad(EQUAL_TO_ALL + "axes = Anything()", "this check takes a list of axes"),
    },
    "topology-4": {
        "the library's own": Bad(
            """
def sum_along(x, axes, axis):
    rank, mesh = comm.get_rank(), lab.Mesh(lab.Topology(axes))
    comm.all_reduce(x, group=mesh.group(axis))
""",
            "switched off",
        ),
    },
}
