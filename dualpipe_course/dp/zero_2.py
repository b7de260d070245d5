"""The exercise of "ZeRO-2": its numbers.

Chapter: book/dp/zero-2.
"""

from dualpipe_course.declared import Predict

NUMBERS = ("bytes held", "bytes sent", "peak of gradient bytes")
_SLIPS = (
    {
        16800: "this is ZeRO-1, 4 + 12 / N; here the gradients are sharded too",
        9600: "this is ZeRO-3, 16 / N; the weights are whole here",
        38400: "this is plain data parallelism",
    },
    {
        7200: "this is one microbatch; each of the 6 sends its gradients",
        43200: "weights are gathered once per step, not in every microbatch",
        33600: "(N - 1) / N: a rank's own shard does not travel",
        21600: "the new weights travel too, once per step",
        64800: "this is ZeRO-3, which gathers weights twice in every microbatch",
    },
    {
        1200: "these are the shards; buckets that fill and travel come on top",
        1600: "these are the two buckets; the shards are there too",
        2000: "one bucket fills while another one is under way",
        4800: "this is the whole gradient, which is never there",
    },
)


numbers = Predict(
    "zero_2-1",
    "Six microbatches",
    NUMBERS,
    lambda n, ranks, bucket: ((2 + 14 / ranks) * n, 14 * (ranks - 1) * n / ranks, 2 * n / ranks + 4 * bucket),
    "{n:,} parameters on {ranks} ranks",
    "more than {bucket} parameters",
    minutes=10,
    points=1,
    hints=(
        "2 + 14 / N bytes per parameter.",
        "Six times the gradients, once the weights: each (N - 1) / N of 4,800 bytes.",
        "The shards of all gradients are 2 bytes for each of 600 numbers; a bucket is 2 bytes for each of 400.",
    ),
    slips=_SLIPS,
    n=(2400, 1600, 3200, 4000, 4800),
    ranks=(4, 2, 8),
    bucket=(400, 200, 300),
    called={"n": "parameters", "bucket": "parameters of a bucket"},
)
