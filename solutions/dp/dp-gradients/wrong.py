"""Typical wrong answers and lazy cheats of the exercises on gradients of data parallelism."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "dp_gradients-1": {
        "all hidden but one": Bad("four_buckets, one_bucket, num_all_reduces = 95, 140, 4", "they do not keep up"),
        "one layer's message": Bad("four_buckets, one_bucket, num_all_reduces = 110, 95, 4", "takes 60 ms"),
        "every microbatch": Bad("four_buckets, one_bucket, num_all_reduces = 110, 140, 20", "the last microbatch"),
    },
    "dp_gradients-2": {
        "a full bucket is too large": Bad([("p.nbytes > bucket", "p.nbytes >= bucket")], "buckets of 128 bytes: rank"),
        "all at the end": Bad([("        launch()\n", "        pass\n")], "sum number 0 started 50 ms"),
        "nothing for the unused": Bad([("        launch(is_last=True)\n", "")], "rank 0 never joined"),
    },
    "dp_gradients-3": {
        "one step only": Bad([("        count.clear()\n", "")], "2 steps: the ranks sent 640 bytes, expected 1,280"),
        "the first microbatch": Bad([("== num_microbatches", "== 1")], "sum number 0 started 10 ms"),
        "never waits": Bad([("            work.wait()\n", "            pass\n")], "waited for 0"),
    },
    "dp_gradients-4": {
        "halves": Bad("layers_per_bucket = [4, 4]", "103 ticks"),
        "one each": Bad("layers_per_bucket = [1] * 8", "109 ticks"),
        "the other way round": Bad("layers_per_bucket = [4, 2, 1, 1]", "busy from 33 to 71, 71 to 84"),
    },
}

CHEATS = {
    "dp_gradients-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "four_buckets = one_bucket = num_all_reduces = Anything()", "must be a whole number"
        ),
    },
    "dp_gradients-2": {
        "the library's own": Bad(
            """
def reduce_in_backward(parameters, bucket_bytes):
    from dualpipe_lab.dp.ddp import GradientReducer
    return GradientReducer(parameters, bucket_bytes=bucket_bytes).finish
""",
            "the library's own is switched off",
        ),
    },
    "dp_gradients-3": {
        "does nothing": Bad(
            "def sum_in_backward(parameters, num_microbatches):\n    return lambda: None", "the ranks sent 0 bytes"
        ),
    },
    "dp_gradients-4": {
        "equal to everything": Bad(EQUAL_TO_ALL + "layers_per_bucket = [Anything()]", "1 layer at least"),
    },
}
