"""Judging rings: a forward whose blocks travel behind work, a backward, parts of a batch of packed documents.

Expected numbers come from `formula` and plain lists, in the main process; ranks run the answer, on the virtual clock.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.comparison import (
    Found,
    Limit,
    Numbers,
    Off,
    Unchanged,
    Values,
    check_limit,
    compare_on_ranks,
    in_words,
)
from dualpipe_course.cp import formula
from dualpipe_course.cp.formula import Matrix
from dualpipe_course.differences import apart
from dualpipe_course.meter import Meter
from dualpipe_course.start.ranks import check_messages_only
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.launch.emulator import Link

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 3
WORK_MS = 10
TOLERANCE = 1e-9  # the formula is a loop in Python, with other roundings
LINK = Link(gbps=1e-3, latency_ms=1)
IGNORE_INDEX = -100
_SYMPTOMS = {
    "dV": ". The weights of a query add up to 1 over the keys of all ranks, with the lse that is given",
    "dK": ". dV is right, so the weights are; look at what is subtracted from dP: dO . out, a sum over all keys",
    "dQ": ". dV and dK are right; dQ stays at home, and every block adds to it",
}


class Case(NamedTuple):
    """A layout by name, its positions and ranks, the scale of queries and keys."""

    layout: str
    length: int
    num_ranks: int
    scale: float = 1.0

    def __str__(self) -> str:
        large = ", large scores" if self.scale > 1 else ""
        return f"{self.length} positions on {self.num_ranks} rank(s), {self.layout}{large}"

    def where(self) -> list[list[int]]:
        """The positions of each rank."""
        layout = make_layout(self.layout, self.length, self.num_ranks)
        return [layout.positions(rank) for rank in range(self.num_ranks)]


def check_forward(fn: Callable[..., Any], case: Case) -> None:
    """Raise `Wrong` unless `fn(q, k, v, where, attend)` is causal attention to all keys, with messages behind work."""
    scales = (case.scale, case.scale, 1.0, 1.0)
    q, k, v, do = (formula.draw(seed, case.length, SIZE, scale) for seed, scale in enumerate(scales))
    where, hidden = case.where(), case.num_ranks * WORK_MS
    blocks = [2 * SIZE * 8 * len(held) for held in where]
    needed = [sum(blocks) - blocks[(rank + 1) % case.num_ranks] for rank in range(case.num_ranks)]
    sent = (
        "rank {rank} sent {found:,} bytes, and {most:,} are needed: the keys and values of every rank but the next "
        "one, once"
    )
    late = (
        f"done after {{found:g}} ms of model time; {case.num_ranks} blocks of {WORK_MS} ms are {hidden} ms. Every "
        "message is shorter than a block's work: is it under way meanwhile?"
    )
    if case.num_ranks == 1:
        needed = [0]

    def beside() -> list[Values]:
        right = formula.attention(q, k, v, do, lambda i, j: j <= i)
        return [{"out": _part_of(right.out, held), "lse": _part_of(right.lse, held)} for held in where]

    compare_on_ranks(
        _forward,
        case.num_ranks,
        fn,
        case,
        (q, k, v),
        case=str(case),
        beside=beside,
        why=_forward_in_words,
        limits=[
            Limit("sent", needed, sent, needed, scope="each"),
            Limit("ms", hidden, late, scope="largest"),
        ],
        tolerance=TOLERANCE,
        clock="virtual",
        link=LINK,
    )


def check_backward(fn: Callable[..., Any], case: Case) -> None:
    """Raise `Wrong` unless `fn(do, q, k, v, out, lse, where)` is the gradient of causal attention, by messages."""
    scales = (case.scale, case.scale, 1.0, 1.0)
    q, k, v, do = (formula.draw(seed, case.length, SIZE, scale) for seed, scale in enumerate(scales))
    right = formula.attention(q, k, v, do, lambda i, j: j <= i)
    wholes = {"dV": right.dv, "dK": right.dk, "dQ": right.dq}
    expected: list[Values] = [{name: _part_of(of, held) for name, of in wholes.items()} for held in case.where()]

    def why(off: Off) -> str:
        others = [rank for rank in range(case.num_ranks) if rank != off.rank] if off.name != "dQ" else []
        owners = [rank for rank in others if off.found and off.found.equals(expected[rank][off.name], TOLERANCE)]
        of = f"; that is the gradient of rank {owners[0]}'s block" if owners else _SYMPTOMS[off.name]
        return _in_words(off) + of

    results = compare_on_ranks(
        _backward,
        case.num_ranks,
        fn,
        case,
        (do, q, k, v, right.out, right.lse),
        case=str(case),
        beside=lambda: expected,
        why=why,
        tolerance=TOLERANCE,
    )
    check_messages_only(results, str(case))
    most = 4 * case.num_ranks * case.length // case.num_ranks * SIZE * 8
    words = f"rank {{rank}} sent {{found:,}} bytes; {case.num_ranks} hops of K, V, dK, dV are {{most:,}}"
    check_limit(results, Limit("sent", most, words, scope="each"), str(case))


def _forward_in_words(off: Off) -> str:
    if off.found is not None and any(value != value for value in off.found.flat):
        return f"{off.name} contains NaN; a query may see nothing of a block: lse -inf"
    return _in_words(off)


def _in_words(off: Off) -> str:
    if off.found is None or off.has_other_shape or off.difference is None:
        return in_words(off)
    ours, theirs = off.found.flat[off.place], off.expected.flat[off.place]
    return f"{off.name}, number {off.place}, {apart(ours, theirs, off.difference.allowed)}"


def _part_of(rows: list[Any], held: Sequence[int]) -> Numbers:
    whole = Numbers.of(rows)
    assert whole is not None
    return Numbers((len(held), *whole.shape[1:]), [number for position in held for number in whole.row(position)])


def check_parts(fn: Callable[..., Any], cases: Sequence[tuple[Case, list[int]]]) -> None:
    """Raise `Wrong` unless `fn(tokens, lengths, layout, rank)` returns a rank's part of packed documents."""
    arguments = [(case, lengths, rank) for case, lengths in cases for rank in range(case.num_ranks)]
    harness = _Parts(fn)
    for (case, lengths, rank), (fine, found) in zip(arguments, call_each(harness, arguments), strict=True):
        words = f"{case}, documents of {lengths}: rank {rank}"
        if not fine:
            raise Wrong(ended(words, found))
        held, tokens = case.where()[rank], _tokens(case)
        places = [place for length in lengths for place in range(length)]
        ends = {sum(lengths[: number + 1]) - 1 for number in range(len(lengths))}
        following = [[IGNORE_INDEX if i in ends else row[i + 1] for i in range(case.length)] for row in tokens]
        expected = {
            "ids": [[row[position] for position in held] for row in tokens],
            "positions": [places[position] for position in held],
            "labels": [[row[position] for position in held] for row in following],
        }
        for name, right in expected.items():
            if found.get(name) != right:
                packed = {
                    "positions": held,
                    "labels": [[IGNORE_INDEX if i + 1 == case.length else row[i + 1] for i in held] for row in tokens],
                }
                why = (
                    "; these are right if the sequence is a single document"
                    if found.get(name) == packed.get(name)
                    else ""
                )
                raise Wrong(f"{words}, which holds {held}: {name} are {found.get(name)}, expected {right}{why}")


class _Parts:
    """Calls the answer with tensors, and returns lists."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, case: Case, lengths: list[int], rank: int) -> dict[str, Any]:
        import torch

        layout = make_layout(case.layout, case.length, case.num_ranks)
        answer = self.fn(torch.tensor(_tokens(case)), list(lengths), layout, rank)
        if not isinstance(answer, tuple) or len(answer) != 3:
            return {}
        return dict(zip(("ids", "labels", "positions"), (x.tolist() for x in answer), strict=True))


def _tokens(case: Case) -> list[list[int]]:
    return [[100 * row + position + 1 for position in range(case.length)] for row in range(2)]


def _forward(rank: int, world_size: int, fn: Callable[..., Any], case: Case, full: tuple[Matrix, ...]) -> Found:
    import torch

    import dualpipe_lab as lab

    def attend(q: "Tensor", k: "Tensor", v: "Tensor", hidden: "Tensor") -> tuple["Tensor", "Tensor"]:
        lab.compute(WORK_MS)
        s = (q @ k.T * SIZE**-0.5).masked_fill(hidden, -torch.inf)
        return s.softmax(1).nan_to_num(0) @ v, s.logsumexp(1)

    where = [torch.tensor(held, dtype=torch.int64) for held in case.where()]
    parts = [torch.tensor(x, dtype=torch.float64)[where[rank]] for x in full]
    lab.comm.barrier()
    meter = Meter()
    answer = fn(*parts, where, attend)
    spent = meter.lap()
    if not isinstance(answer, tuple) or len(answer) != 2:
        return Found({}, refused=f"expected (out, lse), got {type(answer).__name__}")
    values = {name: Numbers.of(x) for name, x in zip(("out", "lse"), answer, strict=True)}
    return Found(values, costs={"sent": spent.bytes, "ms": spent.ms})


def _backward(rank: int, world_size: int, fn: Callable[..., Any], case: Case, full: tuple[Any, ...]) -> Found:
    import torch

    where = [torch.tensor(held) for held in case.where()]
    given = [torch.tensor(x, dtype=torch.float64)[where[rank]] for x in full]
    unchanged, meter = Unchanged(**{str(place): part for place, part in enumerate(given)}), Meter()
    answer = fn(*given, where)
    sent = meter.lap().bytes
    if not isinstance(answer, tuple) or len(answer) != 3:
        return Found({}, refused=f"expected (dq, dk, dv), got {type(answer).__name__}")
    if unchanged.first():
        return Found({}, refused="an argument has changed; add into tensors of your own")
    values = {name: Numbers.of(x) for name, x in zip(("dV", "dK", "dQ"), answer[::-1], strict=True)}
    return Found(values, costs={"sent": sent})
