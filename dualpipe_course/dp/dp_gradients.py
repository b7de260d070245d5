"""Exercises of "DP gradients": when the last sum ends, buckets and hooks, a sum too often, a plan of buckets.

Chapter: book/dp/dp-gradients.  Sums are judged by their values, their bytes and their moments on the virtual clock.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.dp import sums
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.plain import plain
from dualpipe_course.trial import check_ints, needs_function, partial_score

BACKWARDS = (9, 11, 7, 6, 4, 4, 12, 2)  # ticks of each layer's backward, last layer first
MESSAGES = (6, 9, 8, 10, 2, 6, 9, 10)  # ticks of each layer's gradient on the link, last layer first
LATENCY, BEST, WHOLE = 5, 89, 120  # ticks: of each bucket's sum; of the best plan; of a single bucket


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("dp_gradients"), exercise)


@exercise(
    "dp_gradients-1",
    "When the link is the slower one",
    "predict",
    minutes=8,
    points=1,
    hints=(
        "The four gradients are ready at 50, 60, 70 and 80 ms. When does the first sum end?",
        "The second sum cannot start at 60: the link is busy until 65.",
        "A single bucket is full at 80 ms. How long does a message of four layers take?",
    ),
)
def numbers(answer: object) -> str:
    """Predict the step's end for four buckets and for one, and the number of all-reduces in 5 microbatches."""
    slips = (
        {
            95: "that hides all sums but one, and they do not keep up: each takes longer than the backward beside it",
            120: "that adds 4 x 10 for the messages; each takes 15",
            140: "that is the end for a single bucket",
        },
        {
            110: "that is the end for four buckets",
            95: "a message of four layers takes 60 ms",
            65: "the bucket is full only when the first layer's backward is over",
        },
        {20: "the hooks wait for the last microbatch", 5: "one for each bucket, in the last microbatch"},
    )
    general = (
        "draw the link's row below the backward: a sum starts when its bucket is full and the link is free",
        "nothing is hidden: the whole backward, then the whole message",
        "count the buckets, not the microbatches",
    )
    names = ("end with four buckets", "end with one bucket", "number of all-reduces")
    check_ints(answer, names, (110, 140, 4), slips, general)
    return "110 ms with four buckets, 140 ms with one, and 4 all-reduces however many microbatches"


@exercise(
    "dp_gradients-2",
    "Buckets and hooks",
    "implement",
    minutes=50,
    points=5,
    hints=(
        "First the lists: go through the trained parameters backwards; open a new bucket when the next one would not "
        "fit. A parameter larger than bucket_bytes has one of its own.",
        "Make one flat tensor of zeros per bucket, and each .grad a view of its part: flat[a:b].view_as(p). The hook "
        "counts its parameter as ready; while the next bucket in order is complete, start its all_reduce with "
        "async_op=True and keep the Work.",
        "finish() starts the buckets that are left, where a parameter was not used: their gradient is zero already. "
        "Then it waits for all.",
    ),
)
def buckets(fn: Callable[..., Any]) -> str:
    """Write `reduce_in_backward(parameters, bucket_bytes)`: sums leave in buckets during the backward."""
    needs_function(fn)
    for num_ranks, bucket_bytes, rare in (
        (1, 64, None),
        (2, 64, None),
        (2, 10_000, None),
        (2, 128, None),  # three layers fill a bucket to the last byte
        (2, 32, None),  # most layers are larger than a bucket, the first one to come too
        (3, 200, None),
        (2, 128, 2),
        (2, 128, 3),  # the bucket behind it is complete and as large: overtaking mixes them up
    ):
        sums.check_buckets(fn, num_ranks, bucket_bytes, rare)
    return "values, buckets, views and the moment of every sum are right, unused parameters included"


@exercise(
    "dp_gradients-3",
    "A sum too often",
    "find the bug",
    minutes=20,
    points=3,
    hints=(
        "Two ranks, two microbatches, each adds 1: after the first sum there is 2 on each rank. And after the second?",
        "Count in the hook, for each parameter, and let the sum start only with the last microbatch.",
        "The next step begins with the same hooks: set the counts and the list of works back in finish().",
    ),
)
def once(fn: Callable[..., Any]) -> str:
    """Repair `sum_in_backward(parameters, num_microbatches)`: each gradient is summed once per step, while it runs."""
    needs_function(fn)
    for num_ranks, num_microbatches in ((1, 1), (2, 1), (2, 2), (3, 4)):
        sums.check_once(fn, num_ranks, num_microbatches)
    return "one sum per parameter and step, started in the last backward, for 1, 2 and 4 microbatches"


@exercise(
    "dp_gradients-4",
    "A plan of buckets",
    "puzzle",
    minutes=15,
    points=2,
    hints=(
        "The end is that of the last bucket. It should be short, and the link free when it is full.",
        "Each bucket costs 5 ticks of latency. Where does the link stand idle, so that latency costs nothing?",
        "There are only 128 plans: write the loop of the chapter, end = max(end, ready) + message, and try all.",
    ),
)
def plan(answer: object) -> str:
    """Cut eight layers into buckets so that the last sum ends after 89 ticks."""
    sizes = _plan(answer)
    ready = end = first = 0
    for size in sizes:
        last = first + size
        ready += sum(BACKWARDS[first:last])
        end = max(end, ready) + LATENCY + sum(MESSAGES[first:last])
        first = last
    if end > BEST:
        score = partial_score(end, WHOLE, BEST)
        raise Wrong(
            f"the last sum ends after {end} ticks; {BEST} are possible, a single bucket takes {WHOLE}", score=score
        )
    return f"{len(sizes)} buckets, and the last sum ends after {BEST} ticks, the least there is"


def _plan(given: object) -> list[int]:
    answer = plain(given)
    if not isinstance(answer, (list, tuple)) or not answer:
        raise Wrong("this check takes a list of how many layers each bucket holds, last layers first, such as [4, 4]")
    if not all(type(size) is int and size > 0 for size in answer):
        raise Wrong(f"each bucket holds 1 layer at least, as a whole number, got {list(answer)}")
    if sum(answer) != len(BACKWARDS):
        raise Wrong(f"the buckets hold {sum(answer)} layers, and the model has {len(BACKWARDS)}")
    return list(answer)
