"""`Slices`: which part of each tensor lives on which rank, and what the ranks send on the way forward and back.

Chapter: book/tp/column-parallel.  In: the tensors of a layer in the order of its forward, with steps between them.
Out: an SVG that fits a narrow page, or text.  A part has the colour of the first rank that holds it; what all ranks
hold alike has no colour; a summand, of which only the sum over the ranks means something, is marked with a plus.
An upright bar through all ranks is a message; bytes are what one rank sends.
Elsewhere: figure 3 of Shoeybi et al. 2019 (arXiv 1909.08053), drawn by hand there.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple, TypeAlias

Spans: TypeAlias = tuple[tuple[int, int], ...]  # begin and end of each piece that a rank holds

# Okabe and Ito 2008, as in the pictures of collectives
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#d55e00", "#595959")
_BACK = "#d55e00"  # readable on white and on black
_LEFT, _TOP, _ROW, _LONGEST, _SHORTEST, _LETTER, _FOOT = 70, 62, 66, 54, 9, 6.4, 76  # px


class Cut(NamedTuple):
    """A tensor `[rows, columns]` of the whole layer, and what each rank has of it.

    Attributes:
        name: what the text calls it.
        shape: of the whole tensor.
        axis: along which it is cut: 0, 1, or None if every rank has all of it.
        spans: for each rank, begin and end of its pieces, if they are not equal parts in turn.
        is_summand: every rank has a tensor of the whole shape, and only their sum means something.
    """

    name: str
    shape: tuple[int, int]
    axis: int | None = None
    spans: Sequence[Spans] | None = None
    is_summand: bool = False

    def of(self, rank: int, num_ranks: int) -> Spans:
        """The pieces of one rank along the axis.

        >>> Cut("W", (5, 2), axis=0).of(1, 2)
        ((3, 5),)
        """
        if self.axis is None:
            return ((0, self.shape[0]),)
        if self.spans is not None:
            return tuple(self.spans[rank])
        size = self.shape[self.axis]
        part = -(-size // num_ranks)
        return ((min(rank * part, size), min((rank + 1) * part, size)),)

    def owner(self, rank: int, num_ranks: int) -> int | None:
        """The first rank that holds the same; None if all of them do."""
        if self.is_summand:
            return rank
        parts = [self.of(other, num_ranks) for other in range(num_ranks)]
        return None if parts.count(parts[rank]) == num_ranks else parts.index(parts[rank])

    def words(self, rank: int, num_ranks: int) -> str:
        """What a rank has, in words."""
        if self.axis is None:
            return "a summand" if self.is_summand else "all"
        pieces = [f"{start}-{stop - 1}" for start, stop in self.of(rank, num_ranks) if stop > start]
        return f"{('rows', 'columns')[self.axis]} {', '.join(pieces)}" if pieces else "nothing"


class Step(NamedTuple):
    """What happens between two tensors: in words, and in bytes that one rank sends; nothing for work at home."""

    forward: str = ""
    backward: str = ""
    forward_bytes: int = 0
    backward_bytes: int = 0


class Slices:
    """The tensors of a layer on every rank, with arrows; prints as a table, displays as SVG.

    Args:
        name: the conclusion, short.
        num_ranks: how many hold a part.
        path: the tensors in the order of the forward, each two with a `Step` between them.

    Raises:
        ValueError: tensors and steps do not alternate.

    >>> print(Slices("rows of W", 2, [Cut("x", (1, 4)), Step("copy", "sum", 0, 32), Cut("W", (6, 4), axis=0)]))
    rows of W
              x 1x4             W 6x4
    rank 0    all               rows 0-2
    rank 1    all               rows 3-5
    forward          copy: 0 B
    backward         sum: 32 B
    """

    def __init__(self, name: str, num_ranks: int, path: Sequence[Cut | Step]) -> None:
        self.name, self.num_ranks = name, num_ranks
        self.cuts = [part for part in path[::2] if isinstance(part, Cut)]
        self.steps = [part for part in path[1::2] if isinstance(part, Step)]
        if len(self.cuts) + len(self.steps) != len(path) or len(self.cuts) != len(self.steps) + 1:
            kinds = " ".join(type(part).__name__ for part in path)
            raise ValueError(f"{name}: a path is tensors with one step between each two, got {kinds or 'nothing'}")

    def __str__(self) -> str:
        ranks = range(self.num_ranks)
        columns = [["", *(f"rank {rank}" for rank in ranks), "forward", "backward"]]
        for index, cut in enumerate(self.cuts):
            if index:
                step = self.steps[index - 1]
                sides = (step.forward, step.forward_bytes), (step.backward, step.backward_bytes)
                columns.append(
                    ["", *("" for _ in ranks), *(f"{word}: {size:,} B" if word else "" for word, size in sides)]
                )
            title = f"{cut.name} {cut.shape[0]}x{cut.shape[1]}"
            columns.append([title, *(cut.words(rank, self.num_ranks) for rank in ranks), "", ""])
        padded = [[text.ljust(max(map(len, column))) for text in column] for column in columns if any(column)]
        return "\n".join([self.name, *("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))])

    def __repr__(self) -> str:
        return f"<Slices {self.name!r}: {self.num_ranks} ranks, {', '.join(cut.name for cut in self.cuts)}>"

    def _repr_html_(self) -> str:
        label = escape(f"Which part of each tensor lives where in {self.name}, scrollable", quote=True)
        return f'<div style="overflow-x:auto" tabindex="0" role="region" aria-label="{label}">{self.to_svg()}</div>'

    def to_svg(self) -> str:
        """Draw one accessible SVG element; text and lines take the page's text colour."""
        places = self._places()
        width = max(places[-1][1], _LETTER * 1.1 * len(self.name)) + 6
        height = _TOP + _ROW * self.num_ranks + (_FOOT if self.steps else 4)
        title = escape(f"{self.name}: which part of each tensor lives where", quote=True)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" ',
            f'height="{height}" role="img" aria-label="{title}" fill="currentColor" ',
            f'font-family="system-ui,sans-serif" font-size="12"><title>{title}</title><desc>{escape(str(self))}</desc>',
            f'<text x="4" y="16" font-weight="600">{escape(self.name)}</text>',
            *(
                f'<text x="4" y="{_middle(rank) + 4}" opacity=".75">rank {rank}</text>'
                for rank in range(self.num_ranks)
            ),
            *self._labels(_TOP + _ROW * self.num_ranks),
        ]
        for cut, (left, right) in zip(self.cuts, places, strict=True):
            parts += self._tensor(cut, left, right)
        for step, (one, other) in zip(self.steps, pairwise(places), strict=True):
            parts += self._step(step, one[1], other[0])
        return "".join([*parts, "</svg>"])

    def _places(self) -> list[tuple[float, float]]:
        """Where each tensor's column begins and ends, in px."""
        places: list[tuple[float, float]] = []
        x = float(_LEFT)
        for index, cut in enumerate(self.cuts):
            if index:
                step = self.steps[index - 1]
                words = (step.forward, step.backward, _size(step.forward_bytes), _size(step.backward_bytes))
                x += max(30.0, _LETTER * max(map(len, words)) + 8 if any(words[:2]) else 0)
            label = max(len(cut.name), len(_shape(cut)))
            width = max(self._length(cut.shape[1]), _LETTER * label)
            places.append((x, x + width))
            x += width
        return places

    def _length(self, size: int) -> float:
        longest = max(max(cut.shape) for cut in self.cuts)
        return max(_LONGEST * size / longest, _SHORTEST)

    def _tensor(self, cut: Cut, left: float, right: float) -> Iterator[str]:
        centre = (left + right) / 2
        yield f'<text x="{centre:.1f}" y="40" text-anchor="middle" font-weight="600">{escape(cut.name)}</text>'
        yield f'<text x="{centre:.1f}" y="54" text-anchor="middle" font-size="11" opacity=".75">{_shape(cut)}</text>'
        width, height = self._length(cut.shape[1]), self._length(cut.shape[0])
        for rank in range(self.num_ranks):
            x, y = centre - width / 2, _middle(rank) - height / 2
            owner = cut.owner(rank, self.num_ranks)
            colour = 'fill="currentColor" fill-opacity=".3"' if owner is None else f'fill="{_COLOURS[owner % 8]}"'
            for start, stop in cut.of(rank, self.num_ranks):
                begin, length = (
                    start / (cut.shape[cut.axis or 0] or 1),
                    (stop - start) / (cut.shape[cut.axis or 0] or 1),
                )
                box = (x, y + begin * height, width, length * height)
                if cut.axis == 1:
                    box = (x + begin * width, y, length * width, height)
                yield _rect(box, colour)
            yield _rect((x, y, width, height), 'fill="none" stroke="currentColor" stroke-opacity=".6"')
            if cut.is_summand:
                yield (
                    f'<text x="{centre + width / 2 + 3:.1f}" y="{_middle(rank) + 5}" font-size="15" '
                    'font-weight="600">+</text>'
                )

    def _step(self, step: Step, left: float, right: float) -> Iterator[str]:
        centre, bottom = (left + right) / 2, _TOP + _ROW * self.num_ranks
        for rank in range(self.num_ranks):
            yield _arrow(left + 5, right - 5, _middle(rank) - 6, "currentColor")
            yield _arrow(right - 5, left + 5, _middle(rank) + 6, _BACK)
        for size, shift, colour in ((step.forward_bytes, -4, "currentColor"), (step.backward_bytes, 4, _BACK)):
            if size:
                start, stop = _middle(0) - 14, _middle(self.num_ranks - 1) + 14
                yield f'<path d="M{centre + shift:.1f} {start}V{stop}" stroke="{colour}" stroke-width="3"/>'
        sides = (step.forward, step.forward_bytes), (step.backward, step.backward_bytes)
        for row, (words, size) in enumerate(sides):
            if words:
                place = f'x="{centre:.1f}" text-anchor="middle" font-size="11"'
                yield f'<text {place} y="{bottom + 14 + 36 * row}">{escape(words)}</text>'
                yield f'<text {place} y="{bottom + 28 + 36 * row}" opacity=".75">{_size(size)}</text>'

    def _labels(self, bottom: float) -> Iterator[str]:
        for row, words, colour in ((0, "forward", "currentColor"), (1, "backward", _BACK))[: 2 * len(self.steps)]:
            y = bottom + 14 + 36 * row
            yield f'<text x="4" y="{y}" font-size="11" opacity=".75">{words}</text>'
            yield _arrow(*((8, 40) if not row else (40, 8)), y + 9, colour)


def _arrow(start: float, stop: float, y: float, colour: str) -> str:
    back = 5 if stop > start else -5
    head = f"M{stop - back:.1f} {y - 3}L{stop:.1f} {y}L{stop - back:.1f} {y + 3}"
    return f'<path d="M{start:.1f} {y}H{stop:.1f}{head}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _rect(box: tuple[float, float, float, float], style: str) -> str:
    x, y, width, height = (f"{value:.1f}" for value in box)
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {style}/>'


def _middle(rank: int) -> int:
    return _TOP + _ROW * rank + _ROW // 2


def _shape(cut: Cut) -> str:
    return f"{cut.shape[0]} × {cut.shape[1]}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes:,} B"
