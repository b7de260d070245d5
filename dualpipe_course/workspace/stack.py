"""The learner's trainer as a picture: 29 boxes, own ones in colour, and the four runs that call them.

In: the state of each part, which runs have been equal to one process.  Out: SVG, and its words for who sees none.
"""

from collections.abc import Collection, Mapping
from html import escape

from dualpipe_course.own.parts import FAMILIES, PARTS, RUNS

NAME = "trainer.svg"
WIDTH, HEIGHT, GAP, LEFT = 108, 28, 6, 78
_STYLE = {"own": ("#2f6fb0", "#ffffff", ""), "edited": ("#ffffff", "#222222", ' stroke-dasharray="4 3"')}
_OTHER = ("#ffffff", "#222222", "")


def picture(states: Mapping[str, str], equal: Collection[str]) -> str:
    """Draw the stack from the ground up, and the runs beside it."""
    lines = list(FAMILIES.items())[::-1]
    height = len(lines) * (HEIGHT + GAP) + 3 * (HEIGHT + GAP) + GAP
    widest = max(len(parts) for _, parts in lines)
    shapes = []
    for place, (words, of_family) in enumerate(lines):
        y = GAP + place * (HEIGHT + GAP)
        shapes.append(_text(4, y + 19, words, "#222222", "start"))
        for column, part in enumerate(of_family):
            shapes.append(_box(LEFT + column * (WIDTH + GAP), y, part, *_STYLE.get(states[part], _OTHER)))
    y = 2 * GAP + len(lines) * (HEIGHT + GAP)
    shapes.append(_text(4, y + 19, "runs", "#222222", "start"))
    for column, (name, parts) in enumerate(RUNS.items()):
        own = sum(states[part] == "own" for part in parts)
        style = _STYLE["own"] if own == len(parts) else _OTHER
        mark = " ✓" if name in equal else ""
        shapes.append(_box(LEFT + 2 * column * (WIDTH + GAP), y, f"{name}: {own} of {len(parts)}{mark}", *style, 2))
    shapes.append(
        _text(
            4,
            y + HEIGHT + 22,
            "blue: yours; dashed: edited since its last check; white: the course's",
            "#555555",
            "start",
        )
    )
    body, size = "".join(shapes), f"{LEFT + widest * (WIDTH + GAP)} {height}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" rx="8" fill="#f4f4f4"/>{body}</svg>\n'
    )


def in_words(states: Mapping[str, str]) -> str:
    """Say the same in a sentence."""
    own = [part for part in PARTS if states[part] == "own"]
    return f"{len(own)} of {len(PARTS)} parts are yours{': ' * bool(own)}{', '.join(own)}"


def _box(x: int, y: int, words: str, fill: str, ink: str, dashes: str, wide: int = 1) -> str:
    width = wide * WIDTH + (wide - 1) * GAP
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="4" fill="{fill}" stroke="#2f6fb0"{dashes}/>'
    return box + _text(x + width // 2, y + 19, words, ink, "middle")


def _text(x: int, y: int, words: str, ink: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{ink}" text-anchor="{anchor}">{escape(words)}</text>'
