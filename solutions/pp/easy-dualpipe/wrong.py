"""Typical wrong answers and lazy cheats of the exercises on Easy-DualPipe."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "bubble, makespan, peak_of_rank_0, peak_of_rank_2"

TYPICAL = {
    "easy_dualpipe-1": {
        "as many as ranks": Bad(f"{NAMES} = 12, 32, 3, 4", "for m = p"),
        "1F1B": Bad(f"{NAMES} = 25, 45, 6, 4", "1F1B's"),
        "longer gaps": Bad(f"{NAMES} = 18, 38, 3, 4", "the shorter of F and B"),
    },
    "easy_dualpipe-2": {
        "enter one apart": Bad([("2 * place", "place")], "4 ranks, 4 microbatches: rank 2 has both"),
        "groups too far apart": Bad([("2 * num_ranks * group", "3 * num_ranks * group")], "one group of p follows"),
        "forwards upwards": Bad([("way = stage if", "way = num_ranks - 1 - stage if")], "its input is made by"),
    },
    "easy_dualpipe-4": {
        "order only": Bad(
            [("comm.all_reduce(parameter.grad, group=group)", "comm.all_reduce(parameter.grad.div_(2), group=group)")],
            "not averaged",
        ),
        "sum only": Bad([("in sorted(stages)", "in stages")], "must take their stages in one order"),
        "all ranks": Bad([(", group=group", "")], "the sum over several stages"),
    },
}

CHEATS = {
    "easy_dualpipe-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "easy_dualpipe-2": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "def slot(p, m, stage, kind, i):\n    return Anything()", "which is no data"
        ),
    },
    "easy_dualpipe-4": {
        "doubles its own": Bad(
            "def sum_copies(rank, world_size, stages):\n"
            "    for stage in stages.values():\n        for p in stage.parameters():\n            p.grad *= 2",
            "differs from one process",
        ),
    },
}
