"""Typical wrong answers and lazy cheats of the exercises on planning a run."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "fullest, its_gb, fullest_again, its_gb_again = "
_PLAN = 'plan = lab.Plan(precision="bfloat16", '

TYPICAL = {
    "plan_your_run-1": {
        "the last rank": Bad(_PREDICT + "3, 41, 3, 38", "four microbatches"),
        "all microbatches": Bad(_PREDICT + "0, 59, 3, 38", "not 8"),
        "rank 0 again": Bad(_PREDICT + "0, 43, 0, 32", "did not shrink"),
    },
    "plan_your_run-3": {
        "the old plan": Bad(_PLAN + "dp=8, tp=2, zero=1, num_microbatches=8, sequence_parallel=True)", "too much"),
        "eight ranks": Bad(_PLAN + "dp=8, zero=3)", "16 ranks in bfloat16"),
        "ZeRO-3": Bad(_PLAN + "dp=16, zero=3, num_microbatches=4, recompute=True)", "too slow"),
    },
}

CHEATS = {
    "plan_your_run-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "fullest = its_gb = fullest_again = its_gb_again = Anything()", "must be a whole number"
        ),
    },
    "plan_your_run-3": {
        "equal to every plan": Bad(EQUAL_TO_ALL + "plan = Anything()", "give a lab.Plan"),
    },
}
