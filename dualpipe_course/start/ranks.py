"""Exercises of "Ranks and messages": the part `ring`, and an exchange that must not stand still.

Chapter: book/start/ranks-and-messages.  The mechanism counts: messages and bytes come from the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong
from dualpipe_lab.launch.emulator import Link

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_lab.launch.launcher import Results

ONE_MS = Link(gbps=1e6, latency_ms=1)  # the bytes take no time, so that model time counts steps
MS = 1_000_000
SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")
_A_COPY = "x is as it was, so the sum went into a copy: `flatten` copies a transposed matrix"


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
    turned, before = _turned(rank, ranks, numel), blocks.clone()
    found = {"padded": padded(mine, num), "pass_on": _handed_on(rank, ranks, numel)}
    if num > 1:
        left = ranks[ranks.index(rank) - 1]
        found["pass_on"] = pass_on(found["pass_on"], torch.empty_like(_handed_on(left, ranks, numel)), ranks)
    found |= {"reduce_scatter": reduce_scatter(blocks, ranks), "all_gather": all_gather(mine.view(1, -1), ranks)}
    if not blocks.equal(before):
        return Found({}, refused="reduce_scatter has changed x; the sum of a block is a new tensor")
    if numel and found["reduce_scatter"].untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr():
        return Found(
            {}, refused="reduce_scatter returns a part of x itself; a new tensor is asked for, of one rank too"
        )
    slips = {"all_reduce": {_A_COPY: Numbers.of(turned)}}
    meter = Meter()
    all_reduce(turned, ranks)
    sent = meter.lap().bytes
    all_waited_for()
    values = {name: Numbers.of(x) for name, x in (found | {"all_reduce": turned}).items()}
    return Found(values, slips=slips, costs={"sent": sent})


def _ring_sums(rank: int, world_size: int, ranks: list[int], numel: int) -> "dict[str, Tensor | None]":
    import torch

    if rank not in ranks:
        return dict.fromkeys(("padded", "pass_on", "reduce_scatter", "all_gather", "all_reduce"))
    me, whole = ranks.index(rank), torch.stack([_brings(one, ranks, numel) for one in ranks])
    return {
        "padded": torch.cat([whole[me], whole.new_zeros(-numel % len(ranks))]),
        "pass_on": _handed_on(ranks[me - 1], ranks, numel),
        "reduce_scatter": torch.stack([_blocks(one, ranks, numel) for one in ranks]).sum(0).chunk(len(ranks))[me],
        "all_gather": whole,
        "all_reduce": torch.stack([_turned(one, ranks, numel) for one in ranks]).sum(0),
    }


def _brings(rank: int, ranks: list[int], numel: int) -> "Tensor":
    """Whole numbers; the third of a group has hundreds, so that the digits say who is in a sum."""
    import torch

    return 10.0 ** ranks.index(rank) * torch.arange(1, numel + 1, dtype=torch.float64)


def _handed_on(rank: int, ranks: list[int], numel: int) -> "Tensor":
    """What a rank gives to pass_on: the later in the group, the more rows."""
    return _brings(rank, ranks, numel).repeat(1 + ranks.index(rank), 1)


def _turned(rank: int, ranks: list[int], numel: int) -> "Tensor":
    """A transposed matrix, whose rows are not side by side in memory."""
    import torch

    mine = _brings(rank, ranks, numel)
    return torch.stack([mine, 3 * mine]).t()


def _blocks(rank: int, ranks: list[int], numel: int) -> "Tensor":
    """N blocks of two rows, none like another."""
    import torch

    mine = _brings(rank, ranks, numel)
    return torch.cat([torch.stack([mine, -mine]) * (block + 2) for block in range(len(ranks))])


def _ring_bytes(world_size: int, ranks: list[int], numel: int) -> list[Limit]:
    num = len(ranks)
    sent = [2 * (num - 1) * -(-2 * numel // num) * 8 * (rank in ranks) for rank in range(world_size)]
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
