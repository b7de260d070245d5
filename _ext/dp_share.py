"""What search engines and messengers read of a published page: a map of the site, and a card for each page.

In: the address that `html.baseurl` of _config.yml holds.  Out: sitemap.xml, and tags in every page's head; nothing
while there is no address, because both consist of full addresses.
Source: sitemaps.org, protocol 0.9; the Open Graph protocol, ogp.me.
"""

from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

CARD = "_static/card.png"
_LONGEST = 200  # characters of a description


def address_of(app: Sphinx, page: str) -> str:
    """Return the full address of a page."""
    return f"{app.config.html_baseurl.rstrip('/')}/{app.builder.get_target_uri(page)}"


def description_of(doctree: nodes.document) -> str:
    """Return the first paragraph of a page, cut after a word."""
    paragraph = next(iter(doctree.findall(nodes.paragraph)), None)
    text = "" if paragraph is None else " ".join(paragraph.astext().split())
    return text if len(text) <= _LONGEST else text[:_LONGEST].rpartition(" ")[0] + " ..."


def add_card(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Add the tags of a page's card to its head."""
    if not app.config.html_baseurl or doctree is None:
        return
    tags = {
        "og:title": app.env.titles[page].astext(),
        "og:description": description_of(doctree),
        "og:type": "article",
        "og:url": address_of(app, page),
        "og:image": f"{app.config.html_baseurl.rstrip('/')}/{CARD}",
        "og:site_name": app.config.project,
    }
    lines = [f'<meta property="{name}" content="{escape(text)}" />' for name, text in tags.items()]
    lines.append('<meta name="twitter:card" content="summary_large_image" />')
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines])


def write_site(app: Sphinx, error: Exception | None) -> None:
    """Write the map of the site, and the picture of the cards: one step of DualPipe."""
    if error is not None or app.builder.format != "html" or not app.config.html_baseurl:
        return
    from dualpipe_lab import schedules, simulate, viz

    out = Path(app.outdir)
    addresses = [address_of(app, page) for page in sorted(app.env.found_docs)]
    entries = "\n".join(f"  <url><loc>{escape(address)}</loc></url>" for address in addresses)
    xmlns = "http://www.sitemaps.org/schemas/sitemap/0.9"
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    (out / "sitemap.xml").write_text(f'{head}\n<urlset xmlns="{xmlns}">\n{entries}\n</urlset>\n', encoding="utf-8")
    (out / CARD).parent.mkdir(exist_ok=True)
    viz.timeline_png(simulate(schedules.build("dualpipe", 8, 20)), out / CARD, width=1200)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers."""
    app.connect("html-page-context", add_card)
    app.connect("build-finished", write_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
