"""What the SVG of a timeline is made of: colours, places, boxes and paths."""

from typing import NamedTuple

from dualpipe_lab.timeline.spans import WAIT

# kind -> colour of the cell, colour of its letter (contrast at least 5 : 1), word in the legend
PALETTE = {
    "F": ("#0072b2", "#fff", "F forward"),
    "B": ("#e69f00", "#000", "B backward"),
    "I": ("#56b4e9", "#000", "I backward, input"),
    "W": ("#009e73", "#000", "W backward, weights"),
    "compute": ("#0072b2", "#fff", "compute"),
    "collective": ("#cc79a7", "#000", "collective"),
    WAIT: ("none", "currentColor", "wait"),
}
OTHER = ("#f0e442", "#000", "other")

LEFT, RIGHT, TOP, BOTTOM = 62, 96, 44, 34  # px around the rows
FONT, SMALLEST_FONT = 11.0, 9.0  # px, of the letters in the cells
LETTER = 6.4  # px, width of a letter of that font


class Frame(NamedTuple):
    """Where things are, in px."""

    width: float
    height: float
    row: float
    per_time: float
    font: float

    @property
    def plot(self) -> float:
        """Return the width of the rows."""
        return self.width - LEFT - RIGHT

    def top(self, rank: int) -> float:
        """Return where a rank's row begins."""
        return TOP + rank * self.row


def px(value: float) -> str:
    """Write a length with at most one digit after the point.

    >>> px(3.0), px(3.14)
    ('3', '3.1')
    """
    return f"{value:.1f}".removesuffix(".0")


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as a piece of path data."""
    return f"M{px(x)} {px(y)}h{px(width)}v{px(height)}h-{px(width)}z"


def path(kind: str, shape: str) -> str:
    """Return the <path> of all shapes of one kind."""
    if kind == "mark pair":
        return f'<path d="{shape}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    if kind == "mark second":
        return f'<path d="{shape}" stroke="#000" stroke-width="2.5" opacity=".45"/>'
    if kind == WAIT:
        return f'<path d="{shape}" fill="none" stroke="currentColor" stroke-dasharray="2" opacity=".5"/>'
    return f'<path d="{shape}" fill="{PALETTE.get(kind, OTHER)[0]}"/>'
