"""A drawing of the byte ranges of a checkpoint's files and the ranks that read them.

Chapter: book/dp/io.  In: the sizes of the files, what each rank read.  Out: an SVG that fits a narrow page, or text.
A ribbon has the colour of its file; bytes that no rank reads (a header, replicas) are outlined only.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from dualpipe_lab.dp.checkpoint.reader import Read

# Okabe and Ito 2008; readable on white and on black
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_WIDTH, _TOP, _HEIGHT, _HEAD, _GAP, _BAR = 440, 26, 300, 16, 12, 26  # px; height of all files together
_FROM, _TO = 8, 300  # left edges of the files and of the ranks
_LOWEST = 11  # px, of a range that has room for its numbers


class Range(NamedTuple):
    """Bytes `begin` to `end` of a file."""

    file: str
    begin: int
    end: int


class ReadsDrawing:
    """A drawing of byte ranges of files and the ranks that read them; prints as text, displays as SVG.

    Args:
        sizes: bytes of each file, as in `Checkpoint.index.files`.
        reads: by rank, `Restored.reads`.

    >>> print(ReadsDrawing({"a.safetensors": 20}, [[Read("a.safetensors", "w", 8, 20)]]))
    1 file to 1 rank
    rank 0 reads 12 bytes: a 8-20
    """

    def __init__(self, sizes: Mapping[str, int], reads: Sequence[Sequence[Read]]) -> None:
        self.sizes = {_short(file): size for file, size in sizes.items()}
        self.ranges = [_joined(own) for own in reads]

    @property
    def title(self) -> str:
        """The number of files and the number of ranks."""
        files, ranks = len(self.sizes), len(self.ranges)
        return f"{files} file{'s' * (files > 1)} to {ranks} rank{'s' * (ranks > 1)}"

    def __str__(self) -> str:
        lines = [
            f"rank {rank} reads {_total(own):,} bytes: {', '.join(f'{r.file} {r.begin:,}-{r.end:,}' for r in own)}"
            for rank, own in enumerate(self.ranges)
        ]
        return "\n".join([self.title, *lines])

    def __repr__(self) -> str:
        return f"<ReadsDrawing of {self.title}>"

    def _repr_html_(self) -> str:
        return f'<div style="max-width:100%">{self.to_svg()}</div>'

    def to_svg(self) -> str:
        """Draw one accessible SVG element; text and lines take the page's text colour."""
        per_byte = _HEIGHT / max(sum(self.sizes.values()), sum(map(_total, self.ranges)), 1)
        tops, bottom = self._tops([*self.sizes.values()], per_byte)
        starts, end = self._tops([_total(own) for own in self.ranges], per_byte)
        height = max(bottom, end)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
            f'height="{height:.0f}" style="max-width:100%;height:auto" role="img" aria-label="{escape(self.title)}" '
            f'fill="currentColor" font-family="system-ui,sans-serif" font-size="12"><title>{escape(self.title)}</title>'
            f'<desc>{escape(str(self))}</desc><text x="{_FROM}" y="14" font-weight="600">files</text>'
            f'<text x="{_TO}" y="14" font-weight="600">ranks</text>',
        ]
        places = dict(zip(self.sizes, tops, strict=True))
        for index, (file, top) in enumerate(places.items()):
            parts.append(
                f'<rect x="{_FROM}" y="{top:.1f}" width="{_BAR}" height="{self.sizes[file] * per_byte:.1f}" '
                f'fill="none" stroke="{_COLOURS[index % len(_COLOURS)]}"/>'
            )
        for rank, top in enumerate(starts):
            parts += self._ribbons(rank, top, places, per_byte)
        parts += [_heading(_FROM, top, f"{file}, {self.sizes[file]:,} bytes") for file, top in places.items()]
        totals = map(_total, self.ranges)
        parts += [
            _heading(_TO, top, f"rank {rank}, {total:,} bytes")
            for rank, (top, total) in enumerate(zip(starts, totals, strict=True))
        ]
        return "".join([*parts, "</svg>"])

    def _tops(self, sizes: list[int], per_byte: float) -> tuple[list[float], float]:
        """Where each bar begins, and where the last one ends."""
        found, y = [], float(_TOP)
        for size in sizes:
            y += _HEAD
            found.append(y)
            y += size * per_byte + _GAP
        return found, y

    def _ribbons(self, rank: int, y: float, tops: Mapping[str, float], per_byte: float) -> Iterator[str]:
        for file, begin, end in self.ranges[rank]:
            colour = _COLOURS[list(self.sizes).index(file) % len(_COLOURS)]
            size, source = (end - begin) * per_byte, tops[file] + begin * per_byte
            left, right, middle = _FROM + _BAR, _TO, (_FROM + _BAR + _TO) / 2
            for x, top in ((_FROM, source), (_TO, y)):
                yield f'<rect x="{x}" y="{top:.1f}" width="{_BAR}" height="{size:.1f}" fill="{colour}"/>'
            yield (
                f'<path d="M{left} {source:.1f}C{middle} {source:.1f} {middle} {y:.1f} {right} {y:.1f}v{size:.1f}'
                f"C{middle} {y + size:.1f} {middle} {source + size:.1f} {left} {source + size:.1f}z"
                f'" fill="{colour}" fill-opacity=".4"><title>bytes {begin:,} to {end:,} of {file} to rank {rank}'
                "</title></path>"
            )
            if size >= _LOWEST:
                yield f'<text x="{_TO + _BAR + 4}" y="{y + size / 2 + 4:.1f}" font-size="10">{begin:,}–{end:,}</text>'
            y += size


def _short(file: str) -> str:
    return file.removesuffix(".safetensors")


def _total(ranges: Sequence[Range]) -> int:
    return sum(end - begin for _, begin, end in ranges)


def _joined(reads: Sequence[Read]) -> list[Range]:
    """Ranges in the order of the files, those that touch as one."""
    found: list[Range] = []
    for file, begin, end in sorted((_short(read.file), read.begin, read.end) for read in reads):
        if found and found[-1].file == file and found[-1].end >= begin:
            found[-1] = Range(file, found[-1].begin, max(end, found[-1].end))
        else:
            found.append(Range(file, begin, end))
    return found


def _heading(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y - 4:.1f}" font-size="11" opacity=".8">{escape(text)}</text>'
