"""Shared by drawings: the surrounding <svg> element and its display in a notebook."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from html import escape


class Drawing(ABC):
    """A picture that a notebook scales down to its width."""

    @abstractmethod
    def to_svg(self) -> str:
        """Draw one accessible SVG element."""

    def _repr_html_(self) -> str:
        return f'<div style="max-width:100%">{self.to_svg()}</div>'


def svg(
    width: float, height: float, label: str, body: Iterable[str], text: str = "", scales: bool = True, role: str = "img"
) -> str:
    """Return one accessible element; text and lines take the page's text colour; `text` describes it to a reader."""
    label, style = escape(label), ' style="max-width:100%;height:auto"' if scales else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}"{style} role="{role}" aria-label="{label}" fill="currentColor" '
        f'font-family="system-ui,sans-serif" font-size="12"><title>{label}</title>'
        f"{f'<desc>{escape(text)}</desc>' if text else ''}{''.join(body)}</svg>"
    )


def scrollable(picture: str, label: str) -> str:
    """Return a wide picture as a region that scrolls."""
    label = escape(f"{label}, scrollable")
    return f'<div style="overflow-x:auto" tabindex="0" role="region" aria-label="{label}">{picture}</div>'


def rect(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a rectangle, places to a tenth of a pixel."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {style}/>'
