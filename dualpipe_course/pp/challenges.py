"""The challenges of the schedule studio: ten puzzles, the same in the page and in the notebook.

Chapter: book/pp/studio.  Out: the puzzles as data; `dualpipe_course.pp.studio` judges answers, and has the hints.
F, I and W take a tick unless the challenge says otherwise, B takes I and W together.  `bound` is the smallest lower
bound (`dualpipe_lab.pp.lower_bound`) over all placements of the stages on the ranks.
"""

from dualpipe_lab.pp.studio import Challenge

MEND = Challenge(
    "mend",
    "Mend the deadlock",
    "Both ranks wait for each other, for ever. One action on one rank has to move.",
    ranks=2, stages=2, microbatches=2,
    start=("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
    best=9, least=1, bound=7,
)  # fmt: skip
ONCE = Challenge(
    "once",
    "Every action once",
    "One action is missing, one runs twice, and one stands on a rank that does not have its stage.",
    ranks=2, stages=2, microbatches=3,
    start=("0F0 0F1 0B0 0F2 1B1 0B2", "1F0 1B0 1F1 1F2 1F1 1B2"),
    best=12, least=1, bound=10,
)  # fmt: skip
NOTHING = Challenge(
    "nothing",
    "1F1B from nothing",
    "Three empty rows. Write an order that ends by tick 18 and never holds more than three activations on a rank.",
    ranks=3, stages=3, microbatches=4,
    start=("", "", ""),
    best=14, least=2, bound=14, goal=18, in_flight=3,
)  # fmt: skip
LESS = Challenge(
    "less",
    "The same time with less memory",
    "GPipe holds all six microbatches before the first backward. Be as quick, and hold fewer.",
    ranks=4, stages=4, microbatches=6,
    start=tuple(
        " ".join([f"{s}F{m}" for m in range(6)] + [f"{s}B{m}" for m in range(6)]) for s in range(4)
    ),
    best=21, least=3, bound=21, goal=27, in_flight=5,
)  # fmt: skip
ROOM = Challenge(
    "room",
    "Room for two",
    "1F1B holds three activations on rank 0. There is room for two on each rank.",
    ranks=3, stages=3, microbatches=6,
    start=(
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0B4 0B5",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5",
    ),
    best=25, least=2, bound=23, goal=27, in_flight=2,
)  # fmt: skip
SPLIT = Challenge(
    "split",
    "Fill the bubble",
    "1F1B takes 27 ticks, 9 of them idle on each rank. A backward for the weights waits for no rank: split some B.",
    ranks=4, stages=4, microbatches=6,
    start=(
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
    ),
    best=21, least=3, bound=21, goal=24, in_flight=4,
)  # fmt: skip
COPIES = Challenge(
    "copies",
    "A second copy",
    "Each rank may store both stages. Send half of the microbatches through the ranks in the other direction.",
    ranks=2, stages=2, microbatches=4,
    start=("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"),
    best=12, least=2, bound=12, goal=14, directions=2,
)  # fmt: skip
TURN = Challenge(
    "turn",
    "Where the stages are",
    "Four stages on two ranks, and each rank has two that follow one another. Move the stages, then the order.",
    ranks=2, stages=4, microbatches=4,
    start=(
        "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 0F3 1F3 1B2 0B2 1B3 0B3",
        "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2 2F3 3F3 3B3 2B3",
    ),
    best=25, least=3, bound=25, goal=28, in_flight=5,
)  # fmt: skip
LINKS = Challenge(
    "links",
    "Slow links",
    "A message flies for two ticks, and 1F1B, which takes 37, waits for nearly all of them. Thirty are enough.",
    ranks=3, stages=3, microbatches=5,
    start=(
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ),
    best=23, least=4, bound=23, goal=30, costs=(("latency", 2),),
)  # fmt: skip
DUALPIPE = Challenge(
    "dualpipe",
    "Beat DualPipe",
    "On 4 ranks with 8 microbatches DualPipe stores two copies of the model, holds 5 activations, and takes 26 ticks. "
    "Here a stage is half as large: that makes 10 activations and 52 ticks. Store one copy, and be quicker.",
    ranks=4, stages=8, microbatches=8,
    start=("", "", "", ""),
    best=51, least=8, bound=51, goal=51, in_flight=10,
)  # fmt: skip
CHALLENGES = (MEND, ONCE, NOTHING, LESS, ROOM, SPLIT, COPIES, TURN, LINKS, DUALPIPE)
