"""Exercises of "Time": a makespan to predict, messages to hide behind work, an order to find.

Chapter: book/start/time.  All times are model time (virtual clock), so a verdict does not depend on the machine.
"""

from collections.abc import Callable
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.declared import Implement, Predict, Puzzle
from dualpipe_course.start.ranks import SENDS, all_waited_for, check_messages_only
from dualpipe_course.trial import needs_ints, on_ranks
from dualpipe_course.wrong import Wrong
from dualpipe_lab.launch.emulator import Link
from dualpipe_lab.timeline import Message, Span, Timeline

if TYPE_CHECKING:
    from dualpipe_lab.launch.launcher import Results

MS = 1_000_000
SIZE = 250  # numbers of a block, 1,000 bytes in float32
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


class Relay(NamedTuple):
    """A case of the relay: sizes and times in ms."""

    ranks: int
    blocks: int
    work_ms: int
    transfer_ms: int
    latency_ms: int = 1

    @property
    def bound_ms(self) -> int:
        """The first block passes all stages and links; each later one follows after the slowest of them."""
        ranks, blocks, work, transfer, latency = self
        slowest = max(work, transfer) if ranks > 1 else work
        return ranks * work + (ranks - 1) * (transfer + latency) + (blocks - 1) * slowest


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


def _relay(rank: int, world_size: int, fn: Callable[..., Any], case: Relay) -> tuple[list[float | str], list[int]]:
    import torch

    from dualpipe_lab.launch.context import compute

    done: list[int] = []

    def work(x: torch.Tensor, block: int) -> torch.Tensor:
        compute(case.work_ms, f"block {block}")
        done.append(block)
        return 3 * x + 10 * block + rank + 1

    found = fn(rank, world_size, work, case.blocks, SIZE)
    all_waited_for()
    values: list[float | str] = []
    for x in found if rank == world_size - 1 else ():
        is_one_number = x.shape == (SIZE,) and bool((x == x[0]).all())
        values.append(float(x[0]) if is_one_number else f"a tensor {list(x.shape)} that work has not made")
    return values, done


def _check_relay(results: "Results", case: Relay, name: str) -> None:
    for rank, (_, done) in enumerate(results):
        if done != list(range(case.blocks)):
            raise Wrong(f"{name}: rank {rank} worked on blocks {done}, expected 0 to {case.blocks - 1}, each once")
    expected = []
    for block in range(case.blocks):
        x = 0
        for rank in range(case.ranks):
            x = 3 * x + 10 * block + rank + 1
        expected.append(float(x))
    if (values := results[-1][0]) != expected:
        raise Wrong(
            f"{name}: the last rank returned {values}, expected {expected}; "
            "each rank must work on what came in the message"
        )
    check_messages_only(results, name)
    if (count := sum(results.ledger.count(send) for send in SENDS)) != (case.ranks - 1) * case.blocks:
        raise Wrong(f"{name}: {count} messages were sent, expected {(case.ranks - 1) * case.blocks}: one per block")
    if results.timeline.makespan > case.bound_ms * MS:
        raise Wrong(
            f"{name}: it took {results.timeline.makespan / MS:g} ms, {case.bound_ms} ms are possible: "
            "some rank waits for its message to leave, although it could work on the next block",
            picture=results.timeline,
        )


def _judge_relay(fn: Callable[..., Any]) -> str:
    cases = [Relay(1, 2, 5, 8), Relay(2, 1, 5, 8), Relay(2, 2, 5, 3), Relay(3, 4, 10, 8), Relay(4, 5, 4, 9, 2)]
    for case in cases:
        name = f"{case.ranks} rank(s), {case.blocks} block(s), work {case.work_ms} ms, transfer {case.transfer_ms} ms"
        link = Link(gbps=1000 * 8 / (case.transfer_ms * MS), latency_ms=case.latency_ms)  # 1,000 bytes
        results = on_ranks(_relay, case.ranks, fn, case, case=name, clock="virtual", link=link)
        _check_relay(results, case, name)
    return "every transfer hides behind work: makespan and values exact on 1 to 4 ranks"


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

relay = Implement(
    "time-2",
    "Hide the messages",
    "Hand blocks down a line of ranks, so that sending one hides behind the work on the next.",
    judge=_judge_relay,
    minutes=15,
    points=3,
    hints=(
        "Which call returns only when the message has left? Which one returns at once?",
        "isend(...) followed at once by wait() is send. Keep the Work objects, wait for them at the end.",
        "Each rank, for each block: receive, work, hand over; then the next block.",
    ),
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
