"""Exercises of "Time": a makespan to predict, an order of messages to find.

Chapter: book/start/time.  All times are model time (virtual clock), so a verdict does not depend on the machine.
"""

from itertools import permutations

from dualpipe_course.declared import Predict, Puzzle
from dualpipe_course.trial import needs_ints
from dualpipe_course.wrong import Wrong
from dualpipe_lab.timeline import Message, Span, Timeline

SHOWN = ("JOBS",)  # what an answer may use
JOBS = ((10, 4), (9, 7), (5, 2), (3, 8), (1, 6))  # (ms on the link, ms of work) of each message
BUDGET_MS = 31
_MISTAKES = {
    17: "this is when rank 0 ends; rank 1 ends later",
    21: "this is when rank 1 has worked on the first message; the second one is still to come",
    26: "this counts no latency: a message is there 3 ms after its last byte has left",
    27: "the second message cannot leave at 7 ms: the link is occupied by the first one until 12",
    32: "isend does not wait, and latency does not occupy the link: the second message leaves at 12",
}


def draw_order(order: list[int]) -> Timeline:
    """The timeline of an order: rank 0 sends, rank 1 works on each message as it comes; in ms, free of latency."""
    link, free = 0, 0
    sends, work, messages = [], [], []
    for number in order:
        transfer, work_ms = JOBS[number]
        sends.append(Span(0, link, link + transfer, "compute", label=str(number)))
        link += transfer
        free = max(free, link) + work_ms
        work.append(Span(1, free - work_ms, free, "compute", label=str(number)))
        messages.append(Message(0, 1, link - transfer, link, str(number)))
    return Timeline("five messages: the link above, rank 1 below", [sends, work], messages)


def best_ms() -> int:
    """The shortest makespan of all orders."""
    return min(int(draw_order(list(order)).makespan) for order in permutations(range(len(JOBS))))


def _judge_order_of_messages(order: object) -> str:
    numbers = needs_ints(order, tuple(f"place {place}" for place in range(len(JOBS))))
    if sorted(numbers) != list(range(len(JOBS))):
        raise Wrong(f"the order must hold each of the messages 0 to {len(JOBS) - 1} once, got {numbers}")
    timeline = draw_order(numbers)
    found, best, start = timeline.makespan, best_ms(), draw_order(list(range(len(JOBS)))).makespan
    score = max(0.0, float((start - found) / (start - best)))
    if found > BUDGET_MS:
        raise Wrong(
            f"legal: {found} ms, the budget is {BUDGET_MS}, the order 0 1 2 3 4 takes {start}; where is rank 1 idle?",
            score=round(score, 2) * 0.9,
            picture=timeline,
        )
    return f"{found} ms; no order takes less than {best} ms"


two_messages = Predict(
    "time-1",
    "When is it over?",
    ("the makespan in ms",),
    lambda: (29,),
    minutes=5,
    points=1,
    hints=(
        "1 MB at 1 Gbit/s occupies the link for 8 ms, and is there 3 ms after its last byte has left.",
        "The first message leaves from 4 to 12 and is there at 15. The second is handed over at 7: when can it leave?",
        "The second leaves from 12 to 20 and is there at 23. Rank 1 is busy with the first until 21.",
    ),
    slips=(_MISTAKES,),
)


order_of_messages = Puzzle(
    "time-3",
    "Five messages, one link",
    "Order five messages on one link so that the work on them ends early.",
    judge=_judge_order_of_messages,
    minutes=10,
    points=2,
    hints=(
        "Rank 1 is idle until the first message is there. Which message should be first?",
        "After the last message has arrived, its work is still to do. Which message should be last?",
        "Messages with less transfer than work go first, the shortest transfer first; the others last, "
        "the longest work first (Johnson 1954).",
    ),
)
