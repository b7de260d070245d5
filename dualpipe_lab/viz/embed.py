"""Self-contained HTML of a drawing: a custom element, a static picture inside it, and the script of the element.

Chapter: book/start/time.  In: timelines, or the specification of a drawing.  Out: HTML of a notebook output or a page.
With scripts the element plays and recomputes.  Without scripts (an untrusted notebook, a site that strips them) the
static picture remains.  Every output includes the script, because some front ends show each output in its own frame;
the book's pages share one copy (`viz.sphinx`).
A specification is small, exact JSON values: a simulated timeline is sent as its program and its costs, about 4 bytes
per action, and the page computes the times.  Any other timeline is sent as its spans and messages (`Timeline.to_dict`),
and is drawn without sliders.
"""

import base64
import json
import os
import re
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpipe_lab._optional import MissingExtra
from dualpipe_lab.timeline import Span, Timeline
from dualpipe_lab.timeline.colours import check_colour_by
from dualpipe_lab.timeline.json_form import PER_PAIR
from dualpipe_lab.viz.bundle import classic_script, element_script

if TYPE_CHECKING:
    from dualpipe_lab.viz.live.kernel import KernelWidget

Spec = dict[str, Any]

STATIC = "DUALPIPE_LAB_STATIC"  # set where pages are built: no widget is made
ELEMENT_SCRIPT = {"dp-studio": "studio", "dp-planner": "planner"}  # elements that few pages have
TAGS = ("dp-timeline", "dp-steps", "dp-explorer", "dp-live", *ELEMENT_SCRIPT)
_OPEN, _CLOSE = "<script data-dualpipe-lab>", "</script>"
_INLINE = re.compile(f"{re.escape(_OPEN)}.*?{re.escape(_CLOSE)}\n?", re.DOTALL)
# An <img> keeps the page's text colour out of the picture: it gets a light ground, readable in dark pages too.
_GROUND = "<style>svg{background:#fff;color:#1d2733}</style>"
MOST_TRACKS = 3
_OPTIONS = ("time", "look", "selection", "colour_by", "memory", "streams", "activation_bytes")
_BANDS = ("none", "rank", "all")
_SHORTEST = 2**53  # whole numbers below are exact in JavaScript


class Comparison:
    """One to three timelines on one axis; the result of `compare`."""

    def __init__(self, timelines: tuple[Timeline, ...], options: dict[str, Any]) -> None:
        timeline_spec(timelines)  # says at once what cannot be drawn together
        self.timelines = timelines
        self.options = options

    def to_html(self, script: bool = True) -> str:
        """Return the element around static pictures; `script=False` if the page already has the script."""
        return timeline_html(*self.timelines, script=script, **self.options)

    def save(self, path: str | Path) -> None:
        """Write the drawing as one HTML file that needs no network."""
        title = " and ".join(dict.fromkeys(timeline.name for timeline in self.timelines))
        Path(path).write_text(page(self.to_html(), title), encoding="utf-8")

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.timelines))

    def __repr__(self) -> str:
        return f"<Comparison of {' and '.join(repr(timeline.name) for timeline in self.timelines)}>"

    def _repr_html_(self) -> str:
        return self.to_html()


class AskingElement(ABC):
    """An element that asks Python: the kernel of its notebook, or what a published page has beside it."""

    answer: Callable[[str], str]  # of a question of the element; both are JSON

    @abstractmethod
    def to_html(self, script: bool = True, key: str = "") -> str:
        """Return the element; `key` names the widget that answers it."""

    @cached_property
    def widget(self) -> "KernelWidget":
        """The widget that answers the element while a kernel runs; raises MissingExtra without ipywidgets."""
        from dualpipe_lab.viz.live.kernel import KernelWidget

        return KernelWidget(self.answer)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        key = ""
        if has_kernel():
            with suppress(MissingExtra):  # then the element shows its start, and says what is missing
                key = self.widget.key
        return {"text/html": self.to_html(key=key), "text/plain": str(self)}


def compare(*timelines: Timeline, **options: Any) -> Comparison:
    """Draw one to three timelines on one axis.

    The sliders recompute simulated timelines.  Pointing at an action marks it in all timelines.
    `options`: the initial state: time=12 (in the timelines' unit), look=30 (the time at which a drawing starts that is
    wider than its box, as on a phone; default: `time`), selection="3F2", whose critical path is shown,
    colour_by ("kind", "direction", "stage" or "microbatch"), memory (bands of "none", of "rank", the chosen one, or of
    "all"), streams (True: streams and messages below the work; default: where a timeline has streams), and
    activation_bytes (of one stage and microbatch, a number or one per stage, for bands in bytes).
    Raises ValueError for no timeline, more than three, timelines in different units, or an unknown option.

    >>> from dualpipe_lab import schedules, simulate
    >>> programs = [schedules.build(name, num_ranks=2, num_microbatches=3) for name in ("gpipe", "1f1b")]
    >>> compare(*map(simulate, programs))
    <Comparison of 'GPipe' and '1F1B'>
    """
    return Comparison(timelines, options)


def timeline_html(*timelines: Timeline, script: bool = True, **options: Any) -> str:
    """Return one to three timelines as an HTML element around static pictures; options and errors as `compare`.

    `script=False` if the page already has the script.
    """
    spec = timeline_spec(timelines, options)
    drawn = {"colour_by": options.get("colour_by", "kind"), "messages": bool(options.get("streams"))}
    picture = "".join(image(timeline.to_svg(**drawn), f"Timeline of {timeline.name}") for timeline in timelines)
    return element("dp-timeline", spec, picture, script)


def element(tag: str, spec: Spec, picture: str, script: bool = True) -> str:
    """Return one element around its static picture."""
    data = escape(json.dumps(spec, separators=(",", ":"), ensure_ascii=False), quote=False).replace("'", "&#39;")
    return f"<{tag} data-spec='{data}'>{picture}</{tag}>\n" + (inline_script(ELEMENT_SCRIPT.get(tag)) if script else "")


def table(head: Iterable[str], rows: Iterable[Iterable[str]], caption: str = "") -> str:
    """Return rows of words as an HTML table."""

    def row(tag: str, words: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(word)}</{tag}>" for word in words) + "</tr>"

    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{above}{row('th', head)}{''.join(row('td', words) for words in rows)}</table>"


def image(svg: str, words: str) -> str:
    """Return an SVG as an <img>: notebooks that strip SVG elements keep images."""
    grounded = svg.replace("<title>", f"{_GROUND}<title>", 1)
    for sign, code in (("%", "%25"), ("#", "%23"), ('"', "'"), ("<", "%3C"), (">", "%3E"), ("&", "&amp;")):
        grounded = grounded.replace(sign, code)
    return f'<img alt="{escape(words, quote=True)}" style="max-width:100%" src="data:image/svg+xml,{grounded}">'


def inline_script(element: str | None = None) -> str:
    """Return the <script> element that every notebook output includes; for a "studio" there are two."""
    more = f"{_OPEN}{element_script(element)}{_CLOSE}\n" if element else ""
    return f"{_OPEN}{classic_script()}{_CLOSE}\n{more}"


def packed(values: Any) -> str:
    """Return JSON values as text that a page unpacks: compressed, in base 64."""
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def has_kernel() -> bool:
    """Whether a notebook's kernel runs this, whose front end may have a widget manager."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return STATIC not in os.environ and hasattr(get_ipython and get_ipython(), "kernel")


def without_scripts(html: str) -> str:
    """Return a page without the script copies of its outputs."""
    return _INLINE.sub("", html)


def has_elements(html: str) -> bool:
    """Whether a page contains a drawing."""
    return any(f"<{tag} " in html for tag in TAGS)


def element_scripts(html: str) -> list[str]:
    """Return which of them have scripts of their own, such as "studio"."""
    return [name for tag, name in ELEMENT_SCRIPT.items() if f"<{tag} " in html]


def page(body: str, title: str) -> str:
    """Return a complete HTML page that follows the reader's light or dark setting."""
    style = ":root{color-scheme:light dark}body{max-width:75rem;margin:1.5rem auto;padding:0 1rem;font:1rem system-ui}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{style}</style></head><body>\n{body}</body></html>\n'


def timeline_spec(timelines: Sequence[Timeline], options: Mapping[str, Any] | None = None) -> Spec:
    """Return the specification of a drawing of one to three timelines on one axis; options and errors as `compare`."""
    if not 1 <= len(timelines) <= MOST_TRACKS:
        raise ValueError(f"one axis holds 1 to {MOST_TRACKS} timelines, got {len(timelines)}; draw the others apart")
    units = sorted({timeline.unit for timeline in timelines})
    if len(units) > 1:
        raise ValueError(
            f"timelines on one axis need one unit, got {' and '.join(units)}; simulate with costs in nanoseconds and "
            'unit="ns" to compare with a run'
        )
    given = dict(options or {})
    if unknown := set(given) - set(_OPTIONS):
        raise ValueError(f"a timeline has no option {sorted(unknown)[0]!r}; known are {', '.join(_OPTIONS)}")
    check_colour_by(given.get("colour_by", "kind"))
    if given.get("memory", "none") not in _BANDS:
        raise ValueError(f"memory bands are of {', '.join(_BANDS)}, got {given['memory']!r}")
    size = given.pop("activation_bytes", None)
    tracks = [track_spec(timeline) | ({} if size is None else {"activation_bytes": size}) for timeline in timelines]
    return {"tracks": tracks, **given}


def track_spec(timeline: Timeline) -> Spec:
    """Return one timeline as its program and costs if it has them, otherwise as its spans and messages."""
    costs = timeline.costs
    if costs is None or not _is_exact(costs):
        record = timeline.to_dict()
        return {key: record[key] for key in ("name", "source", "unit", "ranks", "messages")}
    if costs["overlap"] == PER_PAIR:
        pairs = [span for spans in timeline.spans_by_rank for span in spans if span.pair is not None]
        costs = {**costs, "overlap": [span.duration for span in pairs]}
    rows = [" ".join(_tokens(spans)) for spans in timeline.spans_by_rank]
    return {"name": timeline.name, "source": timeline.source, "unit": timeline.unit, "rows": rows, "costs": costs}


def _tokens(spans: Sequence[Span]) -> Iterator[str]:
    """Yield a rank's actions as text; an action on the stage of the previous action omits the stage."""
    here: int | None = None
    for span in spans:
        words = []
        for stage, kind, microbatch in span.actions:
            words.append(f"{'' if stage == here else stage}{kind}{microbatch}")
            here = stage
        yield f"({';'.join(words)})" if len(words) > 1 else words[0]


def _is_exact(costs: Mapping[str, Any]) -> bool:
    """Whether JavaScript can represent every cost exactly (a Fraction is text here)."""
    numbers = [number for value in costs.values() for number in (value if isinstance(value, list) else [value])]
    return all(number in (None, PER_PAIR) or (isinstance(number, int) and number < _SHORTEST) for number in numbers)
