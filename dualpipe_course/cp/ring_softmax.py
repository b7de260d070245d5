"""Exercises of "Ring softmax": numbers and latencies, one sum with the same bits.

Chapter: book/cp/ring-softmax.  Pairs are judged against one process, bits rank against rank, messages by
the ledger and by model time with a link of 1 ms latency.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.differences import apart
from dualpipe_course.start.ranks import MS, ONE_MS, check_messages_only
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = tuple(f"dualpipe_lab.cp.{name}" for name in ("ring", "softmax", "online_softmax", "ring_softmax"))
NAMES = ("bytes of the ring", "bytes of two all-reduces", "messages of the ring", "messages of two all-reduces",
         "bytes backward")  # fmt: skip
ROWS, IGNORE_INDEX = 400, -100
TYPES = ("float32", "float64")
# by case: labels that count on each of the ranks, of 4 positions


class Pair(NamedTuple):
    """Maxima and sums that a rank returned, and when, in nanoseconds of model time."""

    m: list[float]
    sums: list[float]
    time: int


def _own_pair(rank: int, name: str) -> "tuple[Tensor, Tensor]":
    """The pair of a rank's scores: row 0 is hidden everywhere, row 1 on ranks 0 and 2, row 2 has huge scores."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    x = 3 * torch.randn(ROWS, 5, generator=generator, dtype=getattr(torch, name))
    x[0] = -torch.inf
    x[1] = -torch.inf if rank in (0, 2) else x[1]
    x[2] = x[2] + 1000 * rank
    m = x.amax(1)
    return m, (x - m.masked_fill(m == -torch.inf, 0)[:, None]).exp().sum(1)


def _pairs(rank: int, world_size: int, fn: Callable[..., Any]) -> list[Pair]:
    """What a rank returns in float32 and in float64, and when."""
    from dualpipe_lab.launch.context import rank_context

    found = []
    for name in TYPES:
        m, total = fn(*_own_pair(rank, name))
        found.append(Pair(m.tolist(), total.tolist(), rank_context().clock.now()))
    return found


def _check_pairs(results: Sequence[Pair], case: str, name: str) -> None:
    import torch

    pairs = [_own_pair(rank, name) for rank in range(len(results))]
    tolerance = 100 * torch.finfo(getattr(torch, name)).eps  # a dozen terms of a few operations each
    largest = torch.stack([m for m, _ in pairs]).amax(0)
    above = largest.masked_fill(largest == -torch.inf, 0).double()
    total = sum((m.double() - above).exp() * part.double() for m, part in pairs)
    kinds = ("hidden everywhere", "hidden on ranks 0 and 2", "thousands apart")
    for rank, (m, sums, _) in enumerate(results):
        if (len(m), len(sums)) != (ROWS, ROWS):
            raise Wrong(f"{case}: rank {rank} returned {len(m)} maxima and {len(sums)} sums, one of each per row")
        for row in range(ROWS):
            kind = f" ({kinds[row]})" if row < len(kinds) else ""
            if m[row] != float(largest[row]):
                raise Wrong(f"{case}: rank {rank}: the maximum of row {row}{kind} is not {float(largest[row]):.6g}")
            wanted = float(torch.as_tensor(total)[row])
            if not abs(sums[row] - wanted) <= tolerance * max(1.0, wanted):
                both = apart(sums[row], wanted, tolerance * max(1.0, wanted))
                raise Wrong(f"{case}: rank {rank}: the sum of row {row}{kind} {both}")
    for rank, (_, sums, _) in enumerate(results):
        if differing := sum(a != b for a, b in zip(sums, results[0][1], strict=True)):
            raise Wrong(
                f"{case}: all sums are right, and {differing} of {ROWS} have other bits on rank {rank} than on rank 0: "
                "they were added up in another order there"
            )


def _judge_same_bits(fn: Callable[..., Any], num_ranks: int) -> None:
    case = f"{ROWS} rows on {num_ranks} rank(s)"
    results = on_ranks(_pairs, num_ranks, Without(fn, *LIBRARY), case=case, clock="virtual", link=ONE_MS)
    for name, found in zip(TYPES, zip(*results, strict=True), strict=True):
        _check_pairs(found, f"{case}, {name}", name)
    check_messages_only(results, case)
    needed, steps = (num_ranks - 1) * 2 * ROWS * (4 + 8), max(found[0].time for found in results) // MS
    for rank in range(num_ranks):
        if (sent := results.ledger.sent(rank=rank)) > needed:
            raise Wrong(
                f"{case}: rank {rank} sends {sent:,} bytes; {needed:,} are enough: each pair comes to a rank once "
                "in float32 and once in float64"
            )
    if steps > num_ranks // 2:
        raise Wrong(
            f"{case}: {steps} messages waited for one another; where pairs go both ways at once, no pair is more "
            f"than {num_ranks // 2} away",
            picture=results.timeline,
        )


numbers = Predict(
    "ring_softmax-1",
    "Rows on a ring of ranks",
    NAMES,
    lambda t, n: ((n - 1) * 8 * t, 16 * (n - 1) * t / n, n - 1, 4 * (n - 1), 8 * (n - 1) * t / n),
    "{t:,} rows of scores are cut over {n} ranks",
    minutes=5,
    points=1,
    hints=(
        "A pair of 1,000 rows is 2,000 numbers of 4 bytes, and it passes 7 links.",
        "An all-reduce of 1,000 numbers sends 2 * 7/8 * 4,000 bytes from each rank, in 14 messages.",
        "The backward sums one number per row; its result is needed everywhere.",
    ),
    slips=(
        {
            28_000: "a pair is two numbers per row",
            64_000: "no rank sends to itself: N - 1 messages",
            7_000: "count fp32",
        },
        {7_000: "the maximum and the sum are two all-reduces", 16_000: "7/8 of it leaves the rank"},
        {14: "the ring goes round once; an all-reduce goes round twice", 8: "after N - 1 turns all is known"},
        {14: "that is one all-reduce; the sum waits for the maximum", 7: "an all-reduce is two rings of 7 messages"},
        {
            14_000: "one number per row is summed",
            0: "the sum of y dy goes over all columns",
            3_500: "both halves count",
        },
    ),
    t=(1000, 2000, 3000, 4000, 5000, 6000, 8000),
    n=(8, 4, 5, 10),
    called={"t": "rows", "n": "ranks"},
)

same_bits = Implement(
    "ring_softmax-2",
    "One sum, the same on all ranks",
    "Write `max_and_sum(m, l)`: the pair of all ranks, both ways round the ring, with the same bits everywhere.",
    cases=((1,), (2,), (3,), (4,), (5,), (6,)),
    judge=_judge_same_bits,
    right="the pairs of 1 to 6 ranks are right in half a turn of the ring, and the same to the last bit on all ranks, "
    "in float32 and float64",
    minutes=20,
    points=3,
    hints=(
        "Merging each pair as it comes adds them in another order on every rank. What if you keep them first?",
        "After i turns two pairs have come: one that rank (rank - i) modulo N made, and one from the other side.",
        "With an even N the pair of the rank opposite would come from both sides in the last turn: let it come from "
        "one. Then add all pairs up in the order of their owners; subtract 0 where the maximum is -inf.",
    ),
)
