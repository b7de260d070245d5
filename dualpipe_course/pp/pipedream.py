"""Exercises of "PipeDream": its versions.

Chapter: book/pp/pipedream.
"""

from dualpipe_course.declared import Predict

NAMES = ("used", "newest at B", "kept", "used with vertical sync", "kept with vertical sync", "peak")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        6: "this is stage 0's, 3 updates old; stage 1 is one stage nearer to the loss",
        8: "this is stage 2's; two stages lie below stage 1",
        9: "this is without a delay, as on the last stage; updates 7 and 8 come after the F",
    },
    {
        7: "between F and B of a minibatch the stage makes more updates: one with each B in between",
        8: "minibatches 0 to 8 have all had their B by then, and numbers start with 0",
        10: "the update of minibatch 9 comes after its B",
    },
    {4: "this is what stage 0 keeps", 2: "the minibatches on the way at stage 1 are 7, 8 and 9, with a version each"},
    {7: "this is stashing without sync; now stage 0's version goes along"},
    {3: "stage 0's version is one update older than what stage 1 would use, so it is kept for one update more"},
    {3: "p - r needs as many microbatches; here a batch has only 2", 4: "rank 1, not rank 0, and a batch has only 2"},
)


versions = Predict(
    "pipedream-1",
    "One minibatch meets stage 1",
    NAMES,
    lambda p, k: (k - p + 2, k, p - 1, k - p + 1, p, 2),
    "PipeDream on {p} ranks",
    "the F of minibatch {k}?",
    "the B of minibatch {k} starts",
    "use for minibatch {k}?",
    "on the same {p} ranks",
    minutes=10,
    points=2,
    hints=(
        "Write the row of rank 1 from 1F8 to 1B9. Each B is followed by an update.",
        "Rank 1 runs two forwards first, then F and B in turn: 1F9 1B7 1F10 1B8 1F11 1B9. How many B come before 1F9?",
        "Vertical sync: what was stage 0's version when it ran 0F9? It is three updates behind.",
    ),
    slips=_SLIPS,
    p=(4, 5, 6),
    k=(9, 8, 10, 11, 12, 13, 14, 15),
    called={"p": "ranks", "k": "minibatch"},
)
