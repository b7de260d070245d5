"""Typical wrong answers and lazy cheats of the exercises on planning a run."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "fullest, its_gb, fullest_again, its_gb_again = "
_PLAN = 'plan = lab.Plan(precision="bfloat16", '
_FASTEST = "def fastest(model, plans, cluster, sequence_length, global_batch):\n    "
_PEAKS = "def peaks(weights, layers, num_microbatches, layer_bytes, logit_bytes):\n    "

TYPICAL = {
    "plan_your_run-1": {
        "the last rank": Bad(_PREDICT + "3, 41, 3, 38", "four microbatches"),
        "all microbatches": Bad(_PREDICT + "0, 59, 3, 38", "not 8"),
        "rank 0 again": Bad(_PREDICT + "0, 43, 0, 32", "did not shrink"),
        "both at once": Bad(_PREDICT + "0, 43, 3, 39", "not there at once"),
    },
    "plan_your_run-2": {
        "whatever fits first": Bad([("return min(found)[1]", "return found[0][1]")], "another that"),
        "the fastest of all": Bad([("if memory.fits:", "if True:")], "does not fit"),
        "the first rank alone": Bad(
            [("memory.fits", "memory.of(0).total.num_bytes <= cluster.accelerator.memory_bytes")], "does not fit"
        ),
        "an error for illegal plans": Bad([("except ValueError", "except KeyError")], "raised ValueError"),
        "an error where nothing fits": Bad([(" if found else None", "")], "raised ValueError"),
    },
    "plan_your_run-3": {
        "the old plan": Bad(_PLAN + "dp=4, cp=4, zero=2, num_microbatches=4)", "needs too much"),
        "tp across the nodes": Bad(_PLAN + "tp=16, num_microbatches=64, sequence_parallel=True)", "too slow"),
        "eight ranks": Bad(_PLAN + "dp=8, zero=3)", "no legal plan"),
        "too few microbatches": Bad(_PLAN + "pp=2, dp=2, cp=4, zero=2, num_microbatches=8)", "50"),
        "float32": Bad("plan = lab.Plan(pp=2, dp=2, cp=4, zero=2, num_microbatches=32)", "no legal plan"),
    },
    "plan_your_run-4": {
        "logits forgotten": Bad([("found[-1] += logit_bytes", "pass")], "which rank has logits"),
        "of all microbatches": Bad([("+= logit_bytes", "+= num_microbatches * logit_bytes")], "how many at once"),
        "on the first rank": Bad([("found[-1]", "found[0]")], "which rank has logits"),
        "on every rank": Bad([("found[-1] += logit_bytes", "found = [f + logit_bytes for f in found]")], "which rank"),
    },
}

CHEATS = {
    "plan_your_run-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "fullest = its_gb = fullest_again = its_gb_again = Anything()", "must be a whole number"
        ),
    },
    "plan_your_run-2": {
        "nothing ever fits": Bad(_FASTEST + "return None", "got None"),
        "a place that is none": Bad(_FASTEST + "return 99", "the place of a plan"),
        "a truth value": Bad(_FASTEST + "return True", "the place of a plan"),
    },
    "plan_your_run-3": {
        "equal to every plan": Bad(EQUAL_TO_ALL + "plan = Anything()", "give a lab.Plan"),
    },
    "plan_your_run-4": {
        "numbers by heart": Bad(_PEAKS + "return [74, 146]", "expected"),
    },
}
