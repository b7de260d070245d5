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
}

CHEATS = {
    "topology-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "dp = next_along_dp = next_along_pp = num_model_groups = Anything()", "whole number"
        )
    },
    "topology-2": {
        "the library's own": Bad(
            """
import dualpipe_lab as lab
def groups(axes, along):
    return sorted(lab.Topology(axes).groups(*along))
""",
            "switched off",
        ),
    },
}
