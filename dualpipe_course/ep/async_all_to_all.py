"""Exercises of "Asynchronous all-to-all": what hides.

Chapter: book/ep/async-all-to-all.
"""

from dualpipe_course.declared import Predict

NAMES = ("forward in turn", "forward overlapped", "backward overlapped", "saved per step")
_SLIPS = (
    {25: "there are two exchanges, one there and one back", 29: "in turn, the shared expert's time is added"},
    {37: "that is in turn; the shared expert runs beside one exchange", 25: "the exchange is longer than the job"},
    {
        34: "backwards the job is the longer one: the exchange ends before it",
        50: "that is in turn; the shared expert's 16 ms run beside one exchange",
        26: "the exchange of the results' gradients and the experts come first, and nothing runs beside them",
    },
    {8: "that is the forward's share; the backward saves too", 24: "forward the job is the shorter one: it hides 8"},
)


numbers = Predict(
    "async_all_to_all-1",
    "The shorter of two",
    NAMES,
    lambda x, e, e_back, s, s_back: (
        2 * x + e + s,
        2 * x + e,
        x + e_back + max(x, s_back),
        min(x, s) + min(x, s_back),
    ),
    "An exchange takes {x} ms. The experts take {e} ms forward and {e_back} backward",
    "the shared expert {s} forward and {s_back} backward.",
    minutes=5,
    points=1,
    hints=(
        "In turn everything adds up: two exchanges, the experts, the shared expert.",
        "Beside each other, an exchange and a job take as long as the longer of the two.",
        "What a direction saves is the shorter of the two; the step saves both.",
    ),
    slips=_SLIPS,
    x=(12, 10, 11, 14),
    e=(5, 4, 6, 7),
    e_back=(10, 9, 12),
    s=(8, 6, 7, 9),
    s_back=(16, 15, 18),
    called={
        "x": "exchange",
        "e": "experts' forward",
        "e_back": "backward",
        "s": "shared expert's forward",
        "s_back": "backward",
    },
)
