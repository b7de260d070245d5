"""Typical wrong answers and lazy cheats of the exercise on DualPipeV."""

from bad_answer import Bad

TYPICAL = {
    "dualpipev-1": {
        "half of the microbatches": Bad([("2 * p, 2 * m)", "2 * p, m)")], "no rank runs 2"),
        "another direction's microbatches": Bad(
            [("(2 * p - 1 - r, 0)", "(2 * p - 1 - r, m)")], "both from microbatch 0 on): 1F2, expected 1F0"
        ),
        "round instead of back": Bad(
            [("min(stage, 2 * p - 1 - stage)", "stage % p")], "place(2, 0) is 0, and position 1 runs stage 2 for it"
        ),
    },
}

CHEATS = {
    "dualpipev-1": {
        "the course's own": Bad("from dualpipe_ours.rows_dualpipev import *", "is the course's own"),
    },
}
