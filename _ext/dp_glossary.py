"""Links the first use of every glossary term on a chapter's page to its entry.

In: a page of a part, when its references are resolved.  Out: the same page; a term in running text, singular or plural,
is a quiet link once per page.  Headings, code, mathematics, pictures and links stay as they are.
"""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

PAGES = re.compile(r"book/(start|dp|tp|cp|pp|ep|whole|hosts)/")
_CLOSED = (nodes.title, nodes.literal, nodes.literal_block, nodes.reference, nodes.math, nodes.math_block, nodes.raw)


def pattern_of(terms: list[str]) -> re.Pattern[str]:
    """Match any of the terms as whole words, the longest first; a plural ends in s or es.

    >>> pattern_of(["stage", "rank"]).findall("Stages of two ranks, staged batches")
    ['Stages', 'ranks']
    """
    words = sorted(terms, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, words))})(?:e?s)?(?![\w-])", re.IGNORECASE)


def split(text: str, pattern: re.Pattern[str], open_terms: set[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the pieces of a text with their terms; a term that is taken leaves `open_terms`.

    >>> list(split("a rank, two ranks", pattern_of(["rank"]), {"rank"}))
    [('a ', None), ('rank', 'rank'), (', two ranks', None)]
    >>> list(split("Gloo or gloo", pattern_of(["GLOO"]), {"GLOO"}))
    [('Gloo', 'GLOO'), (' or gloo', None)]
    """
    start = 0
    terms = {term.lower(): term for term in open_terms}
    for match in pattern.finditer(text):
        found = match[0].lower()
        term = next((terms.pop(word) for word in (found, found[:-1], found[:-2]) if word in terms), None)
        if term is not None:
            open_terms.remove(term)
            if match.start() > start:
                yield text[start : match.start()], None
            yield match[0], term
            start = match.end()
    if start < len(text):
        yield text[start:], None


def link_first_uses(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Replace the first use of each term in `doctree` by a link."""
    objects = app.env.get_domain("std").objects  # type: ignore[attr-defined]
    homes = {name: home for (kind, name), home in objects.items() if kind == "term"}
    if not PAGES.match(page) or not homes:
        return
    pattern, open_terms = pattern_of(list(homes)), set(homes)
    for paragraph in list(doctree.findall(nodes.paragraph)):
        for text in list(paragraph.findall(nodes.Text)):
            if text.parent is None or _is_closed(text):
                continue
            pieces = [_piece(app, page, homes, *piece) for piece in split(text.astext(), pattern, open_terms)]
            if any(isinstance(piece, nodes.reference) for piece in pieces):
                text.parent.replace(text, pieces)


def _is_closed(node: nodes.Node) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, _CLOSED):
            return True
    return False


def _piece(app: Sphinx, page: str, homes: dict[str, Any], text: str, term: str | None) -> nodes.Node:
    if term is None:
        return nodes.Text(text)
    target, label = homes[term]
    address = f"{app.builder.get_relative_uri(page, target)}#{label}"
    return nodes.reference("", text, internal=True, refuri=address, classes=["dp-term"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Run when all references of a page are known."""
    app.connect("doctree-resolved", link_first_uses)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
