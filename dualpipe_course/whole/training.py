"""Exercises of "Training": four numbers of a run.

Chapter: book/whole/training.
"""

from dualpipe_course.declared import Predict

NAMES = ("first sequence", "GB of a checkpoint", "seconds lost", "learning rate in 1e-6")
_SLIPS = (
    {
        7: "this is the number of the microbatch among those of all ranks; a microbatch has 12 sequences",
        72: "this is the beginning of the rank; its microbatch 1 comes after its microbatch 0",
        36: "this is the place under 2 microbatches in all; 4 data ranks have 2 each",
        60: "rank 3 comes after ranks 0, 1 and 2",
    },
    {
        32: "this is the weights alone; there are two moments as well",
        64: "these are the moments alone; the weights are saved as well",
        112: "the working copy in bf16 is made from the float32 weights and needs no place in the checkpoint",
        128: "gradients are not saved: a step begins without any",
    },
    {
        1200: "this is the whole interval; a kill comes in the middle of an interval on average",
        100: "these are steps; a step takes 6 seconds",
        6: "this is one step; a whole part of an interval is lost",
    },
    {
        200: "the factor of the first step is 1/8, so that the first update is not lost; count steps from 1",
        800: "the warm-up takes 8 steps",
        100: "this is the learning rate of step 1",
    },
)


numbers = Predict(
    "training-1",
    "Four numbers of a training run",
    NAMES,
    lambda batch, billions, step, every, peak: (7 * batch / 8, 12 * billions, step * every / 2, 3 * peak / 8),
    "a global batch of {batch} sequences",
    "has {billions} billion parameters",
    "A step takes {step} seconds, and every {every} steps",
    "over 8 steps to {peak} millionths",
    minutes=8,
    points=1,
    hints=(
        "A microbatch has 96 / (4 · 2) sequences, and rank 3 comes after three ranks with two microbatches each.",
        "The working weights can be made again from the float32 ones, and a step begins without gradients.",
        "A kill comes anywhere between two checkpoints. In the warm-up, step 1 has the factor 1/8.",
    ),
    slips=_SLIPS,
    batch=(96, 48, 64, 80),
    billions=(8, 3, 7, 13),
    step=(6, 4, 5, 8),
    every=(200, 100, 500),
    peak=(800, 400, 1600),
    called={
        "batch": "global batch",
        "billions": "billion parameters",
        "step": "seconds of a step",
        "every": "steps between saves",
        "peak": "peak rate in millionths",
    },
)
