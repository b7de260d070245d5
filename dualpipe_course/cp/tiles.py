"""Judging attention in tiles: backwards block by block.

Expected numbers come from `formula`, in the main process; a rank runs the answer and says what it kept and made.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.cp import formula
from dualpipe_course.differences import shape
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong
from dualpipe_lab._private import dispatch_mode

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 3
COPIES = 8  # k, v, dk, dv, and as many again


class Row(NamedTuple):
    """Queries, tiles of keys by their lengths, the last key that a query sees less its number (None: all), scale.

    A rise is by how much scores are larger in each tile than in the one before; for odd queries they are smaller.
    """

    queries: int
    lengths: tuple[int, ...]
    offset: int | None = None
    scale: float = 1.0
    rise: float = 0.0

    def __str__(self) -> str:
        mask = "" if self.offset is None else f", query i sees the keys up to i{self.offset:+}"
        large = ", large scores" if self.scale > 1 else ", scores far below 0" if self.scale < 0 else ""
        rise = f", scores {self.rise:g} higher in each tile than in the last (odd queries: lower)" if self.rise else ""
        return f"{self.queries} queries, tiles of {list(self.lengths)} keys{mask}{large}{rise}"

    def sees(self, i: int, j: int) -> bool:
        """Whether query i sees key j."""
        return self.offset is None or j <= i + self.offset


class Blocks(NamedTuple):
    """Queries, keys, keys at a time, what all scores lie near, and whether the loss uses the LSE."""

    queries: int
    keys: int
    size: int
    scale: float = 1.0
    near: float = 0.0
    uses_lse: bool = True

    def __str__(self) -> str:
        large = ", large scores" if self.scale > 1 else f", scores near {self.near:g}" if self.near else ""
        lse = "" if self.uses_lse else ", dlse 0"
        return f"{self.queries} queries, {self.keys} keys, {self.size} at a time{large}{lse}"

    @property
    def dlse(self) -> list[float]:
        """The gradient of each query's LSE."""
        return [float(self.uses_lse) * x for (x,) in formula.draw(7, self.queries, 1)]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each block."""
        return tuple(min(self.size, self.keys - first) for first in range(0, self.keys, self.size))


def check_blocks(fn: Callable[..., Any], cases: list[Blocks]) -> None:
    """Raise `Wrong` unless `fn(do, dlse, q, k, v, out, lse, size)` returns the gradients, block by block."""
    inputs = [_inputs(case) for case in cases]
    expected = [
        formula.attention(q, k, v, do, dlse=case.dlse) for case, (q, k, v, do) in zip(cases, inputs, strict=True)
    ]
    found = on_ranks(_run_blocks, 1, fn, cases, inputs, expected, case="calling your function")[0]
    for case, of, right, (problem, grads, largest, _) in zip(cases, inputs, expected, found, strict=True):
        if problem:
            raise Wrong(f"{case}: {problem}")
        for name, ours, theirs in zip(("dV", "dK", "dQ"), grads[::-1], (right.dv, right.dk, right.dq), strict=True):
            if different := formula.why_different(name, ours, theirs):
                raise Wrong(f"{case}: {different}{_symptom(name, ours, of, case)}")
        allowed = max(case.queries * max(case.size, SIZE), case.keys * SIZE)
        if case.keys > 3 * SIZE and largest > allowed:
            raise Wrong(
                f"{case}: a tensor of {largest} numbers was made; a tile has {case.queries * case.size} scores, and "
                f"nothing needs more than {allowed}"
            )
    _check_growth(cases, [peak for *_, peak in found])


def check_kept(fn: Callable[..., Any], rows: list[Row]) -> None:
    """Raise `Wrong` unless `fn(do, q, blocks, found, block_backward)` returns the gradients of each row."""
    inputs = [_inputs(row) for row in rows]
    found = on_ranks(_run_kept, 1, fn, rows, inputs, case="calling your function")[0]
    for row, (q, k, v, do), (problem, grads, slips) in zip(rows, inputs, found, strict=True):
        if problem:
            raise Wrong(f"{row}: {problem}")
        right = formula.attention(q, k, v, do, row.sees)
        ends = [sum(row.lengths[: place + 1]) for place in range(len(row.lengths))]
        expected = {"dQ": right.dq}
        for place, (length, end) in enumerate(zip(row.lengths, ends, strict=True)):
            expected[f"dV of block {place}"] = right.dv[end - length : end]
            expected[f"dK of block {place}"] = right.dk[end - length : end]
        for name in sorted(expected, key=lambda name: ("V", "K", "Q").index(name[1])):
            if any(value != value for value in formula.flat(grads[name] or [])):
                raise Wrong(f"{row}: {name} contains NaN; a query may see nothing, and -inf - (-inf) is not a number")
            if different := formula.why_different(name, grads[name], expected[name]):
                like = [words for words, of in slips.items() if not formula.why_different("", grads[name], of[name])]
                raise Wrong(f"{row}: {different}" + (f"; that is the gradient {like[0]}" if like else ""))


def _check_growth(cases: list[Blocks], peaks: list[int]) -> None:
    """A key more may cost rows of dK and dV and a few copies, and not a number per query."""
    for small, large in pairwise(cases):
        grown, keys = peaks[cases.index(large)] - peaks[cases.index(small)], large.keys - small.keys
        if small.queries == large.queries > COPIES * SIZE and grown > 8 * COPIES * SIZE * keys > 0:
            raise Wrong(
                f"{large}: {grown // 8:,} more numbers are alive at once than with {small.keys} keys. {keys} more keys "
                f"have {keys * large.queries:,} more scores; kept tile by tile they are a matrix of all scores too"
            )


def _symptom(name: str, found: Any, inputs: list[formula.Matrix], case: Blocks) -> str:
    """What a sum over the keys, or the gradients of another loss, say about the mistake."""
    if shape(found) != [case.keys, SIZE]:
        return ""
    if name == "dV":
        ours, total = (_column_sums(rows) for rows in (found, inputs[3]))
        num_blocks = -(-case.keys // case.size)
        if num_blocks > 1 and all(abs(a - num_blocks * b) < 1e-9 for a, b in zip(ours, total, strict=True)):
            return (
                f". All dV together are {num_blocks} times all dO together, and there are {num_blocks} blocks: the "
                "weights of a query should add up to 1 over all keys"
            )
    if name == "dK":
        known = ". dV is right, so the weights are; look at what is subtracted from dP"
        q, k, v, do = inputs
        for dlse, loss in (([], "that does not use the LSE"), ([-x for x in case.dlse], "with another sign of dlse")):
            other = formula.attention(q, k, v, do, dlse=dlse).dk
            if case.uses_lse and formula.why_different(name, found, other) is None:
                return f". dK is that of a loss {loss}; by how much does the LSE grow with one score?"
        blocks = [] if case.uses_lse else [found[at : at + case.size] for at in range(0, case.keys, case.size)]
        if len(blocks) > 1 and all(abs(x) < 1e-9 for block in blocks for x in _column_sums(block)):
            return (
                f"{known}. The dK of every block add up to 0 by themselves, and only those of all keys should: no "
                "weight ever moves from one block to another"
            )
        return known
    return ""


def _column_sums(rows: formula.Matrix) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _inputs(case: Row | Blocks) -> list[formula.Matrix]:
    """q, k, v, dO; a scale below 0 makes all scores so, a rise and a level are put into the first column."""
    scale, lengths = case.scale, case.lengths
    q, k, v, do = (
        formula.draw(seed, rows, SIZE, scale if seed < 2 else 1.0)
        for seed, rows in enumerate((case.queries, sum(lengths), sum(lengths), case.queries))
    )
    if scale < 0:
        q, k = ([[sign * abs(x) for x in row] for row in rows] for sign, rows in ((1, q), (-1, k)))
    rise, near = (case.rise, 0.0) if isinstance(case, Row) else (0.0, case.near)
    if rise or near:
        sides = [1 - 2 * (i % 2) if rise else 1 for i in range(case.queries)]
        levels = [near + tile * rise for tile, length in enumerate(lengths) for _ in range(length)]
        factor = SIZE**0.25 * max(abs(rise), abs(near)) ** 0.5  # as large in q as in k: no gradient is off by much
        q = [[factor * side, *row[1:]] for side, row in zip(sides, q, strict=True)]
        k = [[level * SIZE**0.5 / factor, *row[1:]] for level, row in zip(levels, k, strict=True)]
    return [q, k, v, do]


def _tensor(rows: formula.Matrix) -> "Tensor":
    import torch

    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), SIZE)


def _plain(value: object) -> Any:
    import torch

    return value.detach().tolist() if isinstance(value, torch.Tensor) else None


def _tiles(row: Row, k: formula.Matrix, v: formula.Matrix) -> "Iterator[tuple[Tensor, Tensor, Tensor]]":
    import torch

    first = 0
    for length in row.lengths:
        keys = range(first, first + length)
        hidden = torch.tensor([[not row.sees(i, j) for j in keys] for i in range(row.queries)])
        yield *(_tensor(x[first : first + length]) for x in (k, v)), hidden.reshape(row.queries, length)
        first += length


def _run_blocks(
    rank: int, world_size: int, fn: Callable[..., Any], cases: list[Blocks], inputs: list[Any], expected: list[Any]
) -> list[Any]:
    import weakref

    import torch

    from dualpipe_lab.dp.measure import storage_bytes

    class Watch(dispatch_mode()):  # type: ignore[misc]
        largest = peak = 0

        def __init__(self) -> None:
            super().__init__()
            self.alive: dict[int, weakref.ref[Tensor]] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                self.largest, key = max(self.largest, made.numel()), id(made)
                self.alive[key] = weakref.ref(made, lambda _: self.alive.pop(key, None))
            known = [tensor for known in list(self.alive.values()) if (tensor := known()) is not None]
            self.peak = max(self.peak, storage_bytes(known))
            return made

    found: list[Any] = []
    for case, (q, k, v, do), right in zip(cases, inputs, expected, strict=True):
        d_out, *arguments = [_tensor(x) for x in (do, q, k, v, right.out)]
        dlse, lse = (torch.tensor(x, dtype=torch.float64) for x in (case.dlse, right.lse))
        with Watch() as watch:
            answer = fn(d_out, dlse, *arguments, lse, case.size)
        if not isinstance(answer, tuple) or len(answer) != 3:
            found.append((f"expected (dq, dk, dv), got {type(answer).__name__}", None, 0, 0))
            continue
        found.append((None, list(map(_plain, answer)), watch.largest, watch.peak))
    return found


def block_backward(
    do: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor", out: "Tensor", lse: "Tensor", hidden: "Tensor"
) -> "tuple[Tensor, Tensor, Tensor]":
    """What one block adds to dQ, its dK and its dV, if output and LSE are those of whole rows."""
    scale = q.shape[1] ** -0.5
    p = (scale * q @ k.T - lse[:, None]).exp().masked_fill(hidden, 0)
    ds = scale * p * (do @ v.T - (do * out).sum(1, keepdim=True))
    return ds @ k, ds.T @ q, p.T @ do


def _run_kept(rank: int, world_size: int, fn: Callable[..., Any], rows: list[Row], inputs: list[Any]) -> list[Any]:
    import torch

    results: list[Any] = []
    for row, (q, k, v, do) in zip(rows, inputs, strict=True):
        queries, d_out, blocks, found = _tensor(q), _tensor(do), list(_tiles(row, k, v)), []
        for keys, values, hidden in blocks:
            s = (queries @ keys.T * SIZE**-0.5).masked_fill(hidden, -torch.inf)
            found.append((s.softmax(1).nan_to_num(0) @ values, s.logsumexp(1)))
        lse = torch.stack([own for _, own in found]).logsumexp(0)
        slips = {
            "of each block alone: its weights add up to 1 in every block": [(out, own) for out, own in found],
            "with the output of the block: what is subtracted from dP is a sum over the keys of all blocks": [
                (out, lse) for out, _ in found
            ],
        }
        answer = fn(d_out.clone(), queries.clone(), blocks, found, block_backward)
        problem = _why_no_gradients(answer, len(blocks))
        made = {} if problem else _by_name(*answer)
        known = {}
        for words, given in slips.items():
            parts = [block_backward(d_out, queries, b[0], b[1], *of, b[2]) for b, of in zip(blocks, given, strict=True)]
            known[words] = _by_name(sum(part[0] for part in parts), [part[1:] for part in parts])
        results.append((problem, made, known))
    return results


def _why_no_gradients(answer: object, num_blocks: int) -> str:
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"expected (dq, list of (dk, dv)), got {type(answer).__name__}"
    pairs = answer[1]
    if not isinstance(pairs, (list, tuple)) or len(pairs) != num_blocks or any(len(pair) != 2 for pair in pairs):
        return f"expected a pair (dk, dv) for each of {num_blocks} block(s)"
    return ""


def _by_name(dq: object, pairs: Any) -> dict[str, Any]:
    of = {
        f"d{name} of block {place}": _plain(x)
        for place, pair in enumerate(pairs)
        for name, x in zip("KV", pair, strict=True)
    }
    return {"dQ": _plain(dq), **of}
