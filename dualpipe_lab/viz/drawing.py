"""What drawings share: their display in a notebook."""

from abc import ABC, abstractmethod
from html import escape


class Drawing(ABC):
    """A picture that a notebook scales down to its width."""

    @abstractmethod
    def to_svg(self) -> str:
        """Draw one accessible SVG element."""

    def _repr_html_(self) -> str:
        return f'<div style="max-width:100%">{self.to_svg()}</div>'


def scrollable(picture: str, label: str) -> str:
    """Return a wide picture as a region that scrolls."""
    label = escape(f"{label}, scrollable")
    return f'<div style="overflow-x:auto" tabindex="0" role="region" aria-label="{label}">{picture}</div>'
