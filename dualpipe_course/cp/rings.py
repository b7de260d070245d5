"""Judging rings: a forward whose blocks travel behind work, a backward, gradients that come home, parts of a batch.

Expected numbers come from `formula` and plain lists, in the main process; ranks run the answer, on the virtual clock.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.cp import formula
from dualpipe_course.cp.formula import Matrix, check_close
from dualpipe_course.exercise import Wrong
from dualpipe_course.start.ranks import check_messages_only
from dualpipe_course.trial import call_each, ended, on_ranks
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.world.emulate.link import Link

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 3
WORK_MS = 10
LINK = Link(gbps=1e-3, latency_ms=1)
IGNORED = -100
_SYMPTOMS = {
    "dV": ". The weights of a query add up to 1 over the keys of all ranks, with the lse that is given",
    "dK": ". dV is right, so the weights are; look at what is subtracted from dP: dO . out, a sum over all keys",
    "dQ": ". dV and dK are right; dQ stays at home, and every block adds to it",
}
_BLOCK_BYTES = 3 * 8  # of the blocks whose gradients come home


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
    results = on_ranks(_forward, case.num_ranks, fn, case, (q, k, v), case=str(case), clock="virtual", link=LINK)
    expected = formula.attention(q, k, v, do, lambda i, j: j <= i)
    where = case.where()
    for rank, (problem, out, lse, _, _) in enumerate(results):
        if problem:
            raise Wrong(f"{case}: rank {rank}: {problem}")
        for name, ours, whole in (("out", out, expected.out), ("lse", lse, expected.lse)):
            if any(value != value for value in formula.flat(ours)):
                raise Wrong(f"{case}: rank {rank}: {name} contains NaN; a query may see nothing of a block: lse -inf")
            check_close(f"{case}: rank {rank}", name, ours, [whole[position] for position in where[rank]])
    blocks = [2 * SIZE * 8 * len(held) for held in where]
    for rank, (*_, sent, _) in enumerate(results):
        needed = sum(blocks) - blocks[(rank + 1) % case.num_ranks] if case.num_ranks > 1 else 0
        if sent != needed:
            raise Wrong(
                f"{case}: rank {rank} sent {sent:,} bytes, and {needed:,} are needed: the keys and values of every "
                "rank but the next one, once"
            )
    latest, hidden = max(result[-1] for result in results), case.num_ranks * WORK_MS
    if latest > hidden:
        raise Wrong(
            f"{case}: done after {latest:g} ms of model time; {case.num_ranks} blocks of {WORK_MS} ms are {hidden} ms. "
            "Every message is shorter than a block's work: is it under way meanwhile?"
        )


def check_backward(fn: Callable[..., Any], case: Case) -> None:
    """Raise `Wrong` unless `fn(do, q, k, v, out, lse, where)` is the gradient of causal attention, by messages."""
    scales = (case.scale, case.scale, 1.0, 1.0)
    q, k, v, do = (formula.draw(seed, case.length, SIZE, scale) for seed, scale in enumerate(scales))
    right = formula.attention(q, k, v, do, lambda i, j: j <= i)
    given = (do, q, k, v, right.out, right.lse)
    results = on_ranks(_backward, case.num_ranks, fn, case, given, case=str(case))
    where, wholes = case.where(), {"dV": right.dv, "dK": right.dk, "dQ": right.dq}
    for place, (name, whole) in enumerate(wholes.items()):
        expected = [[whole[position] for position in held] for held in where]
        for rank, (problem, grads, _) in enumerate(results):
            if problem:
                raise Wrong(f"{case}: rank {rank}: {problem}")
            if different := formula.why_different(name, grads[place], expected[rank]):
                elsewhere = [other for other in range(case.num_ranks) if other != rank] if name != "dQ" else []
                owners = [r for r in elsewhere if not formula.why_different(name, grads[place], expected[r])]
                symptom = f"; that is the gradient of rank {owners[0]}'s block" if owners else _SYMPTOMS[name]
                raise Wrong(f"{case}: rank {rank}: {different}{symptom}")
    check_messages_only(results, str(case))
    most = 4 * case.num_ranks * case.length // case.num_ranks * SIZE * 8
    for rank, (*_, sent) in enumerate(results):
        if sent > most:
            raise Wrong(f"{case}: rank {rank} sent {sent:,} bytes; {case.num_ranks} hops of K, V, dK, dV are {most:,}")


def check_home(fn: Callable[..., Any], num_ranks: int) -> None:
    """Raise `Wrong` unless `fn(parts)` returns the sum of what all ranks add to the own block."""
    case = f"{num_ranks} rank(s)"
    results = on_ranks(_home, num_ranks, fn, num_ranks, case=case)
    totals = [_total(owner, num_ranks) for owner in range(num_ranks)]
    for rank, (found, has_changed, sent) in enumerate(results):
        if found != totals[rank]:
            raise Wrong(
                f"{case}: rank {rank} returned {found}, its block's gradient is {totals[rank]}{_owner(found, totals)}"
            )
        if has_changed:
            raise Wrong(f"{case}: rank {rank}: one of the parts has changed; add into what travels, not into them")
        if sent > (most := num_ranks * _BLOCK_BYTES):
            raise Wrong(f"{case}: rank {rank} sent {sent} bytes; {num_ranks} hops of a block are {most}, and will do")
    least = num_ranks * (num_ranks - 1) * _BLOCK_BYTES  # each block is added to by all ranks but its own
    if (total := sum(sent for *_, sent in results)) < least:
        raise Wrong(
            f"{case}: the ranks sent {total} bytes through comm; what the others add to a block comes in "
            f"{num_ranks - 1} messages at least, so {least} bytes for all blocks"
        )


def check_parts(fn: Callable[..., Any], cases: Sequence[Case]) -> None:
    """Raise `Wrong` unless `fn(tokens, layout, rank)` returns the ids, labels and positions of a part of a batch."""
    arguments = [(case, rank) for case in cases for rank in range(case.num_ranks)]
    harness = _Parts(fn)
    for (case, rank), (fine, found) in zip(arguments, call_each(harness, arguments), strict=True):
        words = f"{case}: rank {rank}"
        if not fine:
            raise Wrong(ended(words, found))
        held, tokens = case.where()[rank], _tokens(case)
        following = [[*row[1:], IGNORED] for row in tokens]
        expected = {
            "ids": [[row[position] for position in held] for row in tokens],
            "positions": held,
            "labels": [[row[position] for position in held] for row in following],
        }
        for name, right in expected.items():
            if found.get(name) != right:
                raise Wrong(f"{words}, which holds {held}: {name} are {found.get(name)}, expected {right}")


class _Parts:
    """Calls the answer with tensors, and returns lists."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, case: Case, rank: int) -> dict[str, Any]:
        import torch

        layout = make_layout(case.layout, case.length, case.num_ranks)
        answer = self.fn(torch.tensor(_tokens(case)), layout, rank)
        if not isinstance(answer, tuple) or len(answer) != 3:
            return {}
        return dict(zip(("ids", "labels", "positions"), (x.tolist() for x in answer), strict=True))


def _tokens(case: Case) -> list[list[int]]:
    return [[100 * row + position + 1 for position in range(case.length)] for row in range(2)]


def _sent() -> int:
    from dualpipe_lab.world.context import rank_context

    return sum(entry.sent for entry in rank_context().ledger.entries.values())


def _forward(
    rank: int, world_size: int, fn: Callable[..., Any], case: Case, whole: tuple[Matrix, ...]
) -> tuple[Any, ...]:
    import torch

    import dualpipe_lab as lab

    def attend(q: "Tensor", k: "Tensor", v: "Tensor", hidden: "Tensor") -> tuple["Tensor", "Tensor"]:
        lab.compute(WORK_MS)
        s = (q @ k.T * SIZE**-0.5).masked_fill(hidden, -torch.inf)
        return s.softmax(1).nan_to_num(0) @ v, s.logsumexp(1)

    where = [torch.tensor(held) for held in case.where()]
    parts = [torch.tensor(x, dtype=torch.float64)[where[rank]] for x in whole]
    lab.comm.barrier()
    began, before = lab.now(), _sent()
    answer = fn(*parts, where, attend)
    sent, spent = _sent() - before, (lab.now() - began) / 1e6
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"expected (out, lse), got {type(answer).__name__}", None, None, 0, 0
    return None, *(x.detach().tolist() if isinstance(x, torch.Tensor) else None for x in answer), sent, spent


def _backward(
    rank: int, world_size: int, fn: Callable[..., Any], case: Case, whole: tuple[Any, ...]
) -> tuple[str | None, list[Any], int]:
    import torch

    where = [torch.tensor(held) for held in case.where()]
    parts = [torch.tensor(x, dtype=torch.float64)[where[rank]] for x in whole]
    before, given = _sent(), [part.clone() for part in parts]
    answer = fn(*given, where)
    sent = _sent() - before
    if not isinstance(answer, tuple) or len(answer) != 3:
        return f"expected (dq, dk, dv), got {type(answer).__name__}", [], 0
    if any(not torch.equal(part, old) for part, old in zip(given, parts, strict=True)):
        return "an argument has changed; add into tensors of your own", [], 0
    return None, [x.detach().tolist() if isinstance(x, torch.Tensor) else None for x in answer[::-1]], sent


def _part(rank: int, owner: int) -> list[int]:
    """What a rank adds to a block: digits tell who it was."""
    return [10**rank * (owner + 1), 1, -(2**rank)]


def _total(owner: int, num_ranks: int) -> list[int]:
    return [sum(column) for column in zip(*(_part(rank, owner) for rank in range(num_ranks)), strict=True)]


def _owner(found: Any, totals: list[list[int]]) -> str:
    if found in totals:
        return f": that is the gradient of rank {totals.index(found)}'s block"
    return ""


def _home(rank: int, world_size: int, fn: Callable[..., Any], num_ranks: int) -> tuple[Any, bool, int]:
    import torch

    values = [_part(rank, (rank - step) % num_ranks) for step in range(num_ranks)]
    parts = [torch.tensor(value, dtype=torch.float64) for value in values]
    before = _sent()
    found = fn(parts)
    sent = _sent() - before
    has_changed = any(part.tolist() != value for part, value in zip(parts, values, strict=True))
    return [int(x) for x in found.tolist()] if isinstance(found, torch.Tensor) else None, has_changed, sent
