"""Typical wrong answers and lazy cheats of the exercises on DualPipe's two copies."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "seen, sent_by_5, sent_by_2, moments, moments_of_two, squares"

TYPICAL = {
    "dualpipe_copies-1": {
        "all microbatches": Bad(f"{NAMES} = 24, 140000, 80000, 140000, 70000, 50", "the copy on rank 1"),
        "equal stages": Bad(f"{NAMES} = 12, 80000, 80000, 140000, 70000, 50", "the mirror of rank 0"),
        "without ZeRO-1": Bad(f"{NAMES} = 12, 140000, 80000, 280000, 70000, 50", "each of the two mirrors"),
    },
    "dualpipe_copies-3": {
        "nothing tied, as before": Bad([("if w not in summed:", "if True:")], "2 times that of one process"),
        "halved first": Bad(
            [("all_reduce(w.grad, ", "all_reduce(w.grad.div_(2), ")], "0.5 times that of one process: it was halved"
        ),
        "the table not at all": Bad(
            [("if w not in summed:", "if 2 * w.numel() != 20:")], "the gradient of the tied table differs"
        ),
    },
}

CHEATS = {
    "dualpipe_copies-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 6", "whole number")},
    "dualpipe_copies-3": {
        "nothing": Bad("def sum_copies(rank, world_size, stages):\n    pass", "differs from one process"),
    },
}
