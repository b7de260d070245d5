"""Exercises of "Ranks and messages": bytes on a ring, a sum along a tree, an exchange that must not stand still.

Chapter: book/start/ranks-and-messages.  The mechanism counts: messages and bytes come from the ledger, and model time
with a link of 1 ms latency counts the steps that wait for one another.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.trial import on_ranks
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong
from dualpipe_lab.launch.emulator import Link

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_lab.launch.launcher import Results

ONE_MS = Link(gbps=1e6, latency_ms=1)  # the bytes take no time, so that model time counts steps
MS = 1_000_000
SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")
_ELEMENTS = "these are elements; a float32 has 4 bytes"
_HALF = "this is one of the two halves: N - 1 steps add, and N - 1 more hand the finished sums on"


def _three_ranks(n: int) -> Sequence[int] | None:
    return [_sent(n, rank, steps=4) for rank in range(3)] if n % 3 else None


def _sent(n: int, rank: int, steps: int) -> int:
    return 4 * sum(_chunks(n)[(rank - step) % 3] for step in range(steps))


def _chunks(n: int) -> tuple[int, int, int]:
    chunk = -(-n // 3)
    return chunk, chunk, n - 2 * chunk


def _unequal(n: int) -> str:
    first, second, last = _chunks(n)
    return (
        f"the ranks do not send equally much: {n} elements make chunks of {first}, {second} and {last}, "
        "and the closed form 2 (N - 1) / N S is exact only where N divides the size"
    )


def _slips(n: int) -> Known:
    return [
        (
            *((value, _unequal(n)) for value in (16 * n / 3, 16 * n // 3, 16 * n // 3 + 1)),
            (_sent(n, rank, steps=4) // 4, _ELEMENTS),
            (_sent(n, rank, steps=2), _HALF),
        )
        for rank in range(3)
    ]


def check_messages_only(results: "Results", case: str) -> None:
    """Raise `Wrong` if ranks used a collective, or did the work without any message."""
    used = {row[1] for row in results.ledger.rows()}
    if strange := sorted(used - {*SENDS, *RECEIVES}):
        raise Wrong(f"{case}: it calls comm.{strange[0]}; the exercise is to do it with send and recv")
    if len(results) > 1 and not used:
        raise Wrong(
            f"{case}: no message went through dualpipe_lab.comm, and ranks share no memory; use comm.send, comm.recv"
        )


def all_waited_for() -> None:
    """Raise unless this rank has waited for every message that it has started."""
    from dualpipe_lab.launch.context import rank_context

    if open_works := rank_context().in_flight:
        raise RuntimeError(
            f"{len(open_works)} message(s) without a wait(): until its wait() a message's tensor may neither "
            "be read nor changed"
        )


def _sum(rank: int, world_size: int, fn: Callable[..., Any], shape: tuple[int, ...]) -> tuple[list[int], int]:
    import torch

    from dualpipe_lab.launch.context import rank_context

    x = torch.tensor(_parts(rank, prod(shape))).reshape(shape)
    fn(x)
    all_waited_for()
    return x.flatten().tolist(), rank_context().clock.now()


def _parts(rank: int, size: int) -> list[int]:
    """Decimal digits tell who is in a sum: rank 2 adds hundreds."""
    return [10**rank * (1 + element) for element in range(size)]


def _check_sums(results: "Results", world_size: int, size: int, case: str) -> None:
    expected = [sum(values) for values in zip(*(_parts(rank, size) for rank in range(world_size)), strict=True)]
    for rank, (found, _) in enumerate(results):
        if found != expected:
            own = " (what it began with: the sum belongs into x itself)" if found == _parts(rank, size) else ""
            raise Wrong(
                f"{case}: rank {rank} holds {found}{own}, expected {expected}; "
                "rank r contributes 10**r times (1, 2, ...), so the digits say who is missing or counted twice"
            )


def _exchange(rank: int, world_size: int, fn: Callable[..., Any], size: int) -> list[list[int]]:
    import torch

    left, right = fn(torch.tensor(_ends(rank, size)))
    all_waited_for()
    return [left.tolist(), right.tolist()]


def _ends(rank: int, size: int) -> list[int]:
    return [10 * rank + element for element in range(size)]


def _why(world_size: int) -> str:
    if world_size > 2:
        return ""
    return ": with 2 ranks both come from the same rank, in the order in which it sent them"


def _judge_tree_all_reduce(fn: Callable[..., Any], world_size: int, shape: Any) -> None:
    size = prod(shape)
    case = f"{world_size} rank{'s' * (world_size > 1)}, {' x '.join(map(str, shape))} element{'s' * (size > 1)}"
    results = on_ranks(_sum, world_size, fn, shape, case=case, clock="virtual", link=ONE_MS)
    _check_sums(results, world_size, size, case)
    check_messages_only(results, case)
    if (count := sum(results.ledger.count(name) for name in SENDS)) != 2 * (world_size - 1):
        raise Wrong(
            f"{case}: {count} messages were sent, a tree needs 2 (N - 1) = {2 * (world_size - 1)}: "
            "each rank but the root sends its part up once and gets the sum once",
            picture=results.timeline,
        )
    if (sent := sum(results.ledger.sent(name) for name in SENDS)) != (enough := count * size * 8):
        raise Wrong(
            f"{case}: {sent} bytes were sent, {count} messages as large as x have {enough}: "
            "a rank adds what it gets to its own and sends the sum"
        )
    steps, bound = max(time for _, time in results) // MS, 2 * (world_size - 1).bit_length()
    if (busiest := max(results.ledger.count(rank=rank) for rank in range(world_size))) > bound:
        raise Wrong(
            f"{case}: one rank takes part in {busiest} messages, in a tree at most 2 ceil(log2 N) = {bound}: "
            "let half of the ranks collect from the other half, not one rank from all",
            picture=results.timeline,
        )
    if steps > bound:
        raise Wrong(
            f"{case}: {steps} messages waited for one another, a tree needs 2 ceil(log2 N) = {bound}: "
            "in each round, half of the remaining ranks must send at the same time",
            picture=results.timeline,
        )


def _judge_exchange(fn: Callable[..., Any], world_size: int, size: int) -> None:
    case = f"{world_size} ranks"
    results = on_ranks(_exchange, world_size, fn, size, case=case)
    for rank, found in enumerate(results):
        left, right = (rank - 1) % world_size, (rank + 1) % world_size
        expected = [[_ends(left, size)[-1]], [_ends(right, size)[0]]]
        if found == expected[::-1]:
            raise Wrong(f"{case}: rank {rank} has both neighbours' elements, but exchanged{_why(world_size)}")
        if found != expected:
            raise Wrong(f"{case}: rank {rank} returned {found}, expected (from_left, from_right) = {expected}")
    check_messages_only(results, case)
    sent = [sum(results.ledger.sent(name, rank) for name in SENDS) for rank in range(world_size)]
    if set(sent) != {2 * 8}:
        raise Wrong(f"{case}: the ranks sent {sent} bytes; two elements of 8 bytes each are enough")


def _on_the_ring(rank: int, world_size: int, ranks: list[int], numel: int) -> Found:
    """All five functions on a group; ranks that are not in it do nothing."""
    import torch
    from mine.ring import all_gather, all_reduce, padded, pass_on, reduce_scatter

    if rank not in ranks:
        return Found({}, costs={"sent": 0})
    mine, num = _brings(rank, ranks, numel), len(ranks)
    blocks = _blocks(rank, ranks, numel)
    column = mine.repeat(2, 1).t()[:, :1]  # one number in two of what lies in memory
    column, before = column.clone(memory_format=torch.preserve_format), blocks.clone()
    found = {"padded": padded(mine, num), "pass_on": pass_on(mine, mine, ranks) if num > 1 else mine}
    found |= {"reduce_scatter": reduce_scatter(blocks, ranks), "all_gather": all_gather(mine.view(1, -1), ranks)}
    if not blocks.equal(before):
        return Found({}, refused="reduce_scatter has changed x; the sum of a block is a new tensor")
    meter = Meter()
    all_reduce(column, ranks)
    sent = meter.lap().bytes
    all_waited_for()
    return Found({name: Numbers.of(x) for name, x in (found | {"all_reduce": column}).items()}, costs={"sent": sent})


def _ring_sums(rank: int, world_size: int, ranks: list[int], numel: int) -> "dict[str, Tensor | None]":
    import torch

    if rank not in ranks:
        return dict.fromkeys(("padded", "pass_on", "reduce_scatter", "all_gather", "all_reduce"))
    me, whole = ranks.index(rank), torch.stack([_brings(one, ranks, numel) for one in ranks])
    return {
        "padded": torch.cat([whole[me], whole.new_zeros(-numel % len(ranks))]),
        "pass_on": whole[me - 1],
        "reduce_scatter": torch.stack([_blocks(one, ranks, numel) for one in ranks]).sum(0).chunk(len(ranks))[me],
        "all_gather": whole,
        "all_reduce": whole.sum(0).view(-1, 1),
    }


def _brings(rank: int, ranks: list[int], numel: int) -> "Tensor":
    """Whole numbers; the third of a group has hundreds, so that the digits say who is in a sum."""
    import torch

    return 10.0 ** ranks.index(rank) * torch.arange(1, numel + 1, dtype=torch.float64)


def _blocks(rank: int, ranks: list[int], numel: int) -> "Tensor":
    """N blocks of two rows, none like another."""
    import torch

    mine = _brings(rank, ranks, numel)
    return torch.cat([torch.stack([mine, -mine]) * (block + 2) for block in range(len(ranks))])


def _ring_bytes(world_size: int, ranks: list[int], numel: int) -> list[Limit]:
    num = len(ranks)
    sent = [2 * (num - 1) * -(-numel // num) * 8 * (rank in ranks) for rank in range(world_size)]
    words = (
        "rank {rank} sent {found} bytes for an all-reduce, 2 (N - 1) blocks of the padded tensor are {most}: a "
        "reduce-scatter and an all-gather"
    )
    return [Limit("sent", sent, words, least=sent, scope="each")]


def _why_not_on_the_ring(off: Off) -> str:
    if off.name == "reduce_scatter" and off.found and not off.has_other_shape:
        return f"{in_words(off)}. In step s a rank adds its block (me - s - 1) mod N to what has arrived"
    return in_words(off)


ring = Part(
    "ranks-4",
    "ring",
    "Sums on a ring",
    "Write pass_on, reduce_scatter, all_gather, padded and all_reduce of a group of ranks, by messages alone.",
    names=("pass_on", "reduce_scatter", "all_gather", "padded", "all_reduce"),
    trials=(
        OnRanks(
            _on_the_ring,
            (
                (1, [0], 3),
                (2, [0, 1], 2),
                (2, [1, 0], 5),
                (3, [0, 1, 2], 4),
                (4, [1, 3], 3),
                (4, [3, 0, 2], 2),
                (4, [0, 1, 2, 3], 9),
                (2, [0, 1], 0),
            ),
            _ring_sums,
            "group {1} of {0} rank(s), {2} number(s)",
            _ring_bytes,
            _why_not_on_the_ring,
            tolerance=0,
        ),
    ),
    right="8 groups of 1 to 4 ranks in any order, 2 (N - 1) blocks a rank, and no number at all",
    minutes=60,
    points=4,
    hints=(
        "Write pass_on first, and run it: two messages, started before either is waited for. all_gather is N - 1 of "
        "them, each hands on what has just arrived.",
        "In a reduce-scatter a block travels round and every rank adds its own. The block that ends with you begins at "
        "the next rank: you begin with block (me - 1) mod N, and in step s = 1, 2, ... add block (me - s - 1) mod N to "
        "what arrives.",
        "total = blocks[(me - 1) % num].clone(); for step in range(1, num): total = blocks[(me - step - 1) % num] + "
        "pass_on(total, total, ranks). An all-reduce pads, scatters, gathers, and copies the first x.numel() numbers "
        "into x, under torch.no_grad().",
    ),
)

bytes_on_a_ring = Predict(
    "ranks-1",
    "Bytes on a ring",
    ("rank 0", "rank 1", "rank 2"),
    _three_ranks,
    "a tensor of {n} elements",
    minutes=5,
    points=1,
    trail=True,
    hints=(
        "Chunks of 7 elements over 3 ranks: 3, 3 and 1. How many messages does each rank send?",
        "In step s, rank r sends chunk (r - s) mod 3, for s = 0, 1, 2, 3. List the four chunks of each rank.",
        "Rank 0 sends chunks 0, 2, 1, 0: that is 3 + 1 + 3 + 3 elements of 4 bytes.",
    ),
    slips=_slips,
    n=(7, *range(8, 41)),
    called={"n": "elements"},
)

tree_all_reduce = Implement(
    "ranks-2",
    "A sum along a tree",
    "Sum a tensor over any number of ranks: 2 (N - 1) messages in all, at most 2 ceil(log2 N) steps.",
    cases=((1, (1,)), (2, (1,)), (3, (1,)), (4, (2, 3)), (5, (1,)), (8, (3,))),
    judge=_judge_tree_all_reduce,
    right="1 to 8 ranks, 2 (N - 1) messages in 2 ceil(log2 N) steps",
    minutes=25,
    points=3,
    hints=(
        "First bring the sum to rank 0: in round k = 1, 2, 4, ... a rank whose number is an odd multiple of k sends "
        "what it has to the rank k below it, and is done.",
        "Rank r receives in round k if r is a multiple of 2k and r + k exists. That is all that odd sizes need.",
        "The way back is the same rounds in reverse order, with senders and receivers exchanged, and copying.",
    ),
)

exchange = Repair(
    "ranks-3",
    "An exchange that hangs",
    "Repair `exchange(x)`: each rank of a ring gets its left neighbour's last and its right neighbour's first.",
    cases=((2, 4), (3, 4), (4, 1), (5, 6)),
    judge=_judge_exchange,
    right="2 to 5 ranks, two elements each, and no ranks wait in a circle",
    minutes=15,
    points=2,
    trail=True,
    hints=(
        "Run it on 2 ranks and read who waits for whom. What has each rank done before it waits?",
        "Ask for what you need before you wait for anything: irecv returns at once.",
        "With 2 ranks both neighbours are the same rank. Messages between two ranks arrive in the order of sending, "
        "so the receives must be posted in that order too, or carry a tag each.",
    ),
)
