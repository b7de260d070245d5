"""Self-contained HTML of a drawing: a custom element, a static picture inside it, and the script of the element.

Chapter: book/start/time.  In: the specification of a drawing.  Out: HTML of a notebook output or of a page.
With scripts the element plays and recomputes.  Without scripts (an untrusted notebook, a site that strips them) the
static picture remains.  Every output includes the script, because some front ends show each output in its own frame;
the book's pages share one copy (`viz.sphinx`).
"""

import json
import re
from html import escape
from typing import Any

from dualpipe_lab.timeline import Timeline
from dualpipe_lab.viz.bundle import classic_script, element_script
from dualpipe_lab.viz.spec import Spec, timeline_spec

ELEMENT_SCRIPT = {"dp-studio": "studio"}  # elements that few pages have
TAGS = ("dp-timeline", "dp-steps", "dp-explorer", "dp-live", *ELEMENT_SCRIPT)
_OPEN, _CLOSE = "<script data-dualpipe-lab>", "</script>"
_INLINE = re.compile(f"{re.escape(_OPEN)}.*?{re.escape(_CLOSE)}\n?", re.DOTALL)
# An <img> keeps the page's text colour out of the picture: it gets a light ground, readable in dark pages too.
_GROUND = "<style>svg{background:#fff;color:#1d2733}</style>"


def timeline_html(*timelines: Timeline, script: bool = True, **options: Any) -> str:
    """Return one to three timelines as an HTML element; `script=False` if the page already has the script.

    `options`: the initial state, such as time=12, selection="3F2", colour_by="stage", memory="all" or streams=True, all
    of them in `timeline_spec`.  The static picture has the same colours and streams.
    Raises ValueError for no timeline, more than three, timelines in different units, or an unknown option.
    """
    spec = timeline_spec(timelines, options)
    drawn = {"colour_by": options.get("colour_by", "kind"), "messages": bool(options.get("streams"))}
    picture = "".join(image(timeline.to_svg(**drawn), f"Timeline of {timeline.name}") for timeline in timelines)
    return element("dp-timeline", spec, picture, script)


def element(tag: str, spec: Spec, picture: str, script: bool = True) -> str:
    """Return one element around its static picture."""
    data = escape(json.dumps(spec, separators=(",", ":"), ensure_ascii=False), quote=False).replace("'", "&#39;")
    return f"<{tag} data-spec='{data}'>{picture}</{tag}>\n" + (inline_script(ELEMENT_SCRIPT.get(tag)) if script else "")


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
