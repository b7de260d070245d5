"""Exercises of "A tiny DeepSeek-V3": four numbers of its plan.

Chapter: book/whole/deepseek.
"""

from dualpipe_course.declared import Predict
from dualpipe_lab.ep.overlap.closed_forms import overlap_makespan

NAMES = ("GPUs with one expert", "microbatches with labels", "all-to-alls of rows", "ms of a pair")
_SLIPS = (
    {
        2: "64 GPUs hold a stage's experts once, and 128 hold them twice; DualPipe holds every stage on two ranks",
        32: "an expert of a stage lies on GPUs of that stage alone",
        128: "these are the GPUs of a pipeline rank; they share the experts 64 by 64",
        1: "128 GPUs share a pipeline rank, and 64 of them hold its experts once",
    },
    {
        20: "half of the microbatches meet their loss on the other rank",
        1: "the loss of every microbatch that enters at the other end is computed on rank 0",
    },
    {
        80: "rank 0 runs both stages, which have three layers with experts",
        240: "rank 0 runs each stage for 10 microbatches; the other 10 pass the copy",
        60: "a backward has two all-to-alls as well",
        30: "these are passes through layers with experts; each has four all-to-alls",
        200: "the dense layer sends no tokens",
    },
    {
        88: "this is the serial order: work and travel one after the other",
        48: "almost: the first M_B waits for C_B, and only A_F runs meanwhile",
        40: "this is the travel alone; the work takes longer",
    },
)


numbers = Predict(
    "deepseek-1",
    "Four numbers of the plan",
    NAMES,
    lambda m, work, travel: (4, m // 2, 6 * m, overlap_makespan(2, work, travel)),
    "a step has {m} microbatches",
    "takes {work} ms for each of its 12 pieces of work and {travel} ms for",
    minutes=10,
    points=1,
    hints=(
        "2,048 / 16 GPUs share one rank of the pipeline. How often do 64 go into that, and how many ranks of the "
        "pipeline hold a stage?",
        "Rank 0 holds both stages: stage 0 for the microbatches that enter here, stage 1 for the others.",
        "The pair has 12 pieces of work and 8 all-to-alls; look at the longer sum, then at the beginning.",
    ),
    slips=_SLIPS,
    m=(20, 12, 16, 24, 28),
    work=(4, 5, 6, 7, 8),
    travel=lambda work, **_: work + 1,
    called={"m": "microbatches", "travel": "all-to-all"},
)
