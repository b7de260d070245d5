"""`Shards`: which shard of each tensor each rank holds, and what the ranks send in forward and backward.

Chapter: book/tp/column-parallel.  In: the tensors of a layer in the order of its forward, with transitions between
them.  Out: an SVG that fits a narrow page, or text.
A shard has the colour of the first rank that holds it.  A tensor that all ranks hold has no colour.  A plus marks a
summand: only its sum over the ranks has a meaning.  A vertical bar through all ranks is a message; bytes are those that
one rank sends.
Elsewhere: figure 3 of Shoeybi et al. 2019 (arXiv 1909.08053), drawn by hand there.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from dualpipe_lab.plan.fields import text_table
from dualpipe_lab.timeline.colours import NUMBERED
from dualpipe_lab.timeline.scene import NOTE, heading, px, rect, shape, svg, text
from dualpipe_lab.viz.drawing import scrollable

Intervals: TypeAlias = tuple[tuple[int, int], ...]  # [begin, end) of each piece of a shard

_BACK = "#d55e00"  # readable on white and on black
_LEFT, _TOP, _ROW, _LONGEST, _SHORTEST, _LETTER, _FOOT = 70, 62, 66, 54, 9, 6.4, 76  # px


class ShardedTensor(NamedTuple):
    """A tensor `[rows, columns]` and its shard on each rank.

    Attributes:
        name: its name in the text.
        shape: the shape of the full tensor.
        dim: the sharded dimension, 0 or 1; None if every rank holds the full tensor.
        intervals: for each rank, the pieces of its shard along `dim`; None: equal shards in the order of the ranks.
        is_partial: every rank holds a tensor of the full shape, and only their sum has a meaning.
    """

    name: str
    shape: tuple[int, int]
    dim: int | None = None
    intervals: Sequence[Intervals] | None = None
    is_partial: bool = False

    def shard(self, rank: int, num_ranks: int) -> Intervals:
        """Return the pieces of one rank's shard along `dim`.

        >>> ShardedTensor("W", (5, 2), dim=0).shard(1, 2)
        ((3, 5),)
        """
        if self.dim is None:
            return ((0, self.shape[0]),)
        if self.intervals is not None:
            return tuple(self.intervals[rank])
        size = self.shape[self.dim]
        rows = -(-size // num_ranks)
        return ((min(rank * rows, size), min((rank + 1) * rows, size)),)

    def owner(self, rank: int, num_ranks: int) -> int | None:
        """Return the first rank that holds the same shard; None if all ranks hold it."""
        if self.is_partial:
            return rank
        shards = [self.shard(other, num_ranks) for other in range(num_ranks)]
        return None if shards.count(shards[rank]) == num_ranks else shards.index(shards[rank])

    def words(self, rank: int, num_ranks: int) -> str:
        """Return a rank's shard in words."""
        if self.dim is None:
            return "a partial sum" if self.is_partial else "all"
        pieces = [f"{start}-{stop - 1}" for start, stop in self.shard(rank, num_ranks) if stop > start]
        return f"{('rows', 'columns')[self.dim]} {', '.join(pieces)}" if pieces else "nothing"


class Transition(NamedTuple):
    """The operation between two tensors, forward and backward: its words, and the bytes that one rank sends."""

    forward: str = ""
    backward: str = ""
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def sides(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Words and bytes, forward and backward."""
        return (self.forward, self.forward_bytes), (self.backward, self.backward_bytes)


class Shards:
    """The shards of a layer's tensors on every rank, with arrows; prints as a table, displays as SVG.

    Args:
        name: the conclusion, short.
        num_ranks: the number of ranks.
        path: the tensors in the order of the forward, a `Transition` between each two.

    Raises:
        ValueError: tensors and transitions do not alternate.

    >>> x, weight = ShardedTensor("x", (1, 4)), ShardedTensor("W", (6, 4), dim=0)
    >>> print(Shards("rows of W", 2, [x, Transition("copy", "sum", 0, 32), weight]))
    rows of W
              x 1x4             W 6x4
    rank 0    all               rows 0-2
    rank 1    all               rows 3-5
    forward          copy: 0 B
    backward         sum: 32 B
    """

    def __init__(self, name: str, num_ranks: int, path: Sequence[ShardedTensor | Transition]) -> None:
        self.name, self.num_ranks = name, num_ranks
        self.tensors = [part for part in path[::2] if isinstance(part, ShardedTensor)]
        self.transitions = [part for part in path[1::2] if isinstance(part, Transition)]
        if len(self.tensors) + len(self.transitions) != len(path) or len(self.tensors) != len(self.transitions) + 1:
            kinds = " ".join(type(part).__name__ for part in path)
            raise ValueError(
                f"{name}: a path is tensors with one transition between each two, got {kinds or 'nothing'}"
            )

    def __str__(self) -> str:
        ranks = range(self.num_ranks)
        columns = [["", *(f"rank {rank}" for rank in ranks), "forward", "backward"]]
        for index, tensor in enumerate(self.tensors):
            if index:
                told = (f"{word}: {size:,} B" if word else "" for word, size in self.transitions[index - 1].sides)
                columns.append(["", *("" for _ in ranks), *told])
            title = f"{tensor.name} {tensor.shape[0]}x{tensor.shape[1]}"
            columns.append([title, *(tensor.words(rank, self.num_ranks) for rank in ranks), "", ""])
        return f"{self.name}\n{text_table([*zip(*filter(any, columns), strict=True)])}"

    def __repr__(self) -> str:
        return f"<Shards {self.name!r}: {self.num_ranks} ranks, {', '.join(tensor.name for tensor in self.tensors)}>"

    def _repr_html_(self) -> str:
        return scrollable(self.to_svg(), f"Which part of each tensor lives where in {self.name}")

    def to_svg(self) -> str:
        """Draw one accessible SVG element; text and lines take the page's text colour."""
        places = self._places()
        width = max(places[-1][1], _LETTER * 1.1 * len(self.name)) + 6
        height = _TOP + _ROW * self.num_ranks + (_FOOT if self.transitions else 4)
        title = f"{self.name}: which part of each tensor lives where"
        parts = [heading(self.name)]
        parts += [text(4, _middle(r) + 4, f"rank {r}", opacity=".75") for r in range(self.num_ranks)]
        parts += self._labels(_TOP + _ROW * self.num_ranks)
        for tensor, (left, right) in zip(self.tensors, places, strict=True):
            parts += self._tensor(tensor, left, right)
        for transition, (one, other) in zip(self.transitions, pairwise(places), strict=True):
            parts += self._transition(transition, one[1], other[0])
        return svg(width, height, title, parts, str(self), scales=False)

    def _places(self) -> list[tuple[float, float]]:
        places: list[tuple[float, float]] = []
        x = float(_LEFT)
        for index, tensor in enumerate(self.tensors):
            if index:
                sides = self.transitions[index - 1].sides
                longest = max(max(len(told), len(_size(size))) for told, size in sides)
                x += max(30.0, _LETTER * longest + 8 if any(told for told, _ in sides) else 0)
            label = max(len(tensor.name), len(_shape(tensor)))
            width = max(self._length(tensor.shape[1]), _LETTER * label)
            places.append((x, x + width))
            x += width
        return places

    def _length(self, size: int) -> float:
        longest = max(max(tensor.shape) for tensor in self.tensors)
        return max(_LONGEST * size / longest, _SHORTEST)

    def _tensor(self, tensor: ShardedTensor, left: float, right: float) -> Iterator[str]:
        centre = (left + right) / 2
        yield text(centre, 40, tensor.name, text_anchor="middle", font_weight=600)
        yield text(centre, 54, _shape(tensor), text_anchor="middle", **NOTE)
        width, height = self._length(tensor.shape[1]), self._length(tensor.shape[0])
        for rank in range(self.num_ranks):
            x, y = centre - width / 2, _middle(rank) - height / 2
            owner = tensor.owner(rank, self.num_ranks)
            style: dict[str, Any] = {"fill": "currentColor", "fill_opacity": ".3"}
            if owner is not None:
                style = {"fill": NUMBERED[owner % len(NUMBERED)][0]}
            for start, stop in tensor.shard(rank, self.num_ranks):
                size = tensor.shape[tensor.dim or 0] or 1
                begin, length = start / size, (stop - start) / size
                if tensor.dim == 1:
                    yield rect(x + begin * width, y, length * width, height, **style)
                else:
                    yield rect(x, y + begin * height, width, length * height, **style)
            yield rect(x, y, width, height, fill="none", stroke="currentColor", stroke_opacity=".6")
            if tensor.is_partial:
                yield text(x + width + 3, _middle(rank) + 5, "+", font_size=15, font_weight=600)

    def _transition(self, transition: Transition, left: float, right: float) -> Iterator[str]:
        centre, bottom = (left + right) / 2, _TOP + _ROW * self.num_ranks
        for rank in range(self.num_ranks):
            yield _arrow(left + 5, right - 5, _middle(rank) - 6, "currentColor")
            yield _arrow(right - 5, left + 5, _middle(rank) + 6, _BACK)
        start, stop = _middle(0) - 14, _middle(self.num_ranks - 1) + 14
        for (_, size), shift, colour in zip(transition.sides, (-4, 4), ("currentColor", _BACK), strict=True):
            if size:
                yield shape("path", d=f"M{px(centre + shift)} {start}V{stop}", stroke=colour, stroke_width=3)
        for row, (words, size) in enumerate(transition.sides):
            if words:
                yield text(centre, bottom + 14 + 36 * row, words, text_anchor="middle", font_size=11)
                yield text(centre, bottom + 28 + 36 * row, _size(size), text_anchor="middle", **NOTE)

    def _labels(self, bottom: float) -> Iterator[str]:
        for row, words, colour in ((0, "forward", "currentColor"), (1, "backward", _BACK))[: 2 * len(self.transitions)]:
            y = bottom + 14 + 36 * row
            yield text(4, y, words, **NOTE)
            yield _arrow(*((8, 40) if not row else (40, 8)), y + 9, colour)


def _arrow(start: float, stop: float, y: float, colour: str) -> str:
    back = 5 if stop > start else -5
    head = f"M{px(stop - back)} {y - 3}L{px(stop)} {y}L{px(stop - back)} {y + 3}"
    return shape("path", d=f"M{px(start)} {y}H{px(stop)}{head}", fill="none", stroke=colour, stroke_width=1.5)


def _middle(rank: int) -> int:
    return _TOP + _ROW * rank + _ROW // 2


def _shape(tensor: ShardedTensor) -> str:
    return f"{tensor.shape[0]} × {tensor.shape[1]}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes:,} B"
