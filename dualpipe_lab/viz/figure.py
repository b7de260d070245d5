"""Inline SVG of line and bar charts: matplotlib draws the geometry, the page's theme gives the colours.

In: a matplotlib figure that is drawn with the colours of this module.  Out: one accessible <svg> element.
Each colour stands for a CSS variable of the theme (`--pst-color-*` of the book, `--dp-*` of its style sheet), so the
picture follows light and dark; without the variable the fallback behind it counts.  Text stays text.  The same figure
gives the same bytes: no date, a fixed salt for ids, at most two digits after the point.
Elsewhere: matplotlib's `savefig(format="svg")`, whose pictures are white rectangles on a dark page.
"""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT, MUTED, GRID = "#010101", "#020202", "#030303"
LINES = ("#010101", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # Okabe and Ito 2008, after the text colour
BARS = ("#0072b3", "#56b4e9")  # two blues, so that neighbours differ
_THEME = {
    TEXT: "var(--pst-color-text-base, currentColor)",
    MUTED: "var(--pst-color-text-muted, currentColor)",
    GRID: "var(--pst-color-border, currentColor)",
    **{colour: f"var(--dp-line-{number}, {colour})" for number, colour in enumerate(LINES) if number},
    BARS[0]: "var(--dp-bar-1, #0072b2)",
    BARS[1]: "var(--dp-bar-2, #56b4e9)",
}
_XLINK = "{http://www.w3.org/1999/xlink}href"
_LONG = re.compile(r"(-?\d+\.\d{2})\d+")
_FAMILY = re.compile(r"font-family: [^;]*; ")
_IDS = "IDS-"  # replaced by a prefix of the picture, so that ids differ on a page
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")


def new_axes(width: float, height: float, plot: tuple[float, float, float, float]) -> "tuple[Figure, Axes]":
    """Return a figure of `width` x `height` px, and axes at `plot`: left, top, right, bottom, px from the top left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    left, top, right, bottom = plot
    axes = figure.add_axes((left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height))
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=11, labelcolor=TEXT, pad=6)
    return figure, axes


def write(figure: "Figure", x: float, y: float, text: str, **style: Any) -> None:
    """Write text into a figure, `x` and `y` px from the top left; a $ is a dollar sign."""
    width, height = 72 * figure.get_size_inches()
    figure.text(x / width, 1 - y / height, text, **{"color": TEXT, "fontsize": 12, "parse_math": False, **style})


def inline_svg(
    figure: "Figure", label: str, description: str, groups: Mapping[str, str] | None = None, style: str = ""
) -> str:
    """Return a figure as one <svg> element with a title and a description.

    `groups`: gid -> words.  All artists of one gid form one group, which has the words as its label and takes the
    keyboard's focus.  `style`: CSS rules of the picture.
    """
    root = ET.fromstring(_raw_svg(figure))  # noqa: S314 - written by matplotlib
    for element in root.iter():
        _clean(element)
    groups = groups or {}
    gathered = [_gather(root, gid, words) for gid, words in groups.items()]
    body = "".join(_written(element) for element in [*gathered, *root] if element.tag not in ("metadata", "defs"))
    body = body.replace(_IDS, f"dp-{sha256((label + body).encode()).hexdigest()[:8]}-")
    width, height = (round(72 * size) for size in figure.get_size_inches())
    name = escape(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="max-width:100%;height:auto" role="{"group" if groups else "img"}" aria-label="{name}" '
        f'fill="currentColor" font-family="system-ui,sans-serif" stroke-linejoin="round"><title>{name}</title>'
        f"<desc>{escape(description)}</desc>{f'<style>{style}</style>' if style else ''}{body}</svg>"
    )


def _raw_svg(figure: "Figure") -> bytes:
    import matplotlib

    stream = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "dualpipe-lab", "path.simplify": False}
    with matplotlib.rc_context(settings):
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return stream.getvalue()


def _clean(element: ET.Element) -> None:
    """Shorten names and numbers, replace colours by the theme's, and leave the font's family to the page."""
    element.tag = element.tag.rpartition("}")[2]
    for name in {"d", "x", "y", "transform"} & set(element.attrib):
        element.set(name, " ".join(_LONG.sub(r"\1", element.attrib[name]).split()))
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if style := element.get("style"):
        element.set("style", _COLOUR.sub(lambda found: _THEME.get(found[0], found[0]), _FAMILY.sub("", style)))
    if reference := element.attrib.pop(_XLINK, None):  # of a marker, to its shape
        element.set("href", f"#{_IDS}{reference[1:]}")
    if element.tag == "path" and "id" in element.attrib:
        element.set("id", _IDS + element.attrib["id"])


def _gather(root: ET.Element, gid: str, words: str) -> ET.Element:
    """Move the artists of one gid into a labelled group, which is drawn below the others."""
    group = ET.Element("g", {"class": "dp-piece", "tabindex": "0", "role": "img", "aria-label": words})
    ET.SubElement(group, "title").text = words
    for parent in list(root.iter()):
        for element in [element for element in parent if element.get("id") == gid]:
            parent.remove(element)
            group.append(element)
    return group


def _written(element: ET.Element) -> str:
    """Write an element; of matplotlib's own groups only the contents, because their ids repeat on a page."""
    children = "".join(map(_written, element))
    attributes = {name: value for name, value in element.attrib.items() if element.tag != "g" or name != "id"}
    if element.tag == "g" and not attributes:
        return children
    text = escape((element.text or "").strip()) + children
    words = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items())
    return f"<{element.tag}{words}>{text}</{element.tag}>" if text else f"<{element.tag}{words}/>"
