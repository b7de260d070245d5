"""A page at every address that the book had: what moved leads to where it is now.

In: `moved_pages` of _config.yml, old page to new page, both without suffix.  Out: at each old address a page that
sends the browser on and says so; a link for browsers that do not follow.
"""

from html import escape
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

_PAGE = """<!doctype html>
<html lang="{language}"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="refresh" content="0; url={address}"><link rel="canonical" href="{address}"></head>
<body><p>This page is now at <a href="{address}">{title}</a>.</p></body></html>
"""


def write_moved(app: Sphinx, error: Exception | None) -> None:
    """Write a page for every address that moved; raises ExtensionError for a wrong line of the list."""
    if error is not None or app.builder.format != "html":
        return
    for old, new in app.config.moved_pages.items():
        page = new.partition("#")[0]
        if page not in app.env.found_docs:
            raise ExtensionError(f"moved_pages sends {old} to {page}, which is no page of the book")
        if old in app.env.found_docs:
            raise ExtensionError(f"moved_pages holds {old}, which is still a page of the book")
        address = app.builder.get_relative_uri(old, page) + new[len(page) :]
        target = Path(app.outdir) / f"{old}.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        title = escape(app.env.titles[page].astext())
        text = _PAGE.format(language=app.config.language or "en", title=title, address=escape(address))
        target.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handler."""
    app.add_config_value("moved_pages", {}, "", [dict])
    app.connect("build-finished", write_moved)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
