"""Where numbers come from, as small marks: "(simulated)" and "(quoted: its report)" do not stop a sentence.

In: the paragraphs of a part's page.  Out: each such parenthesis is a letter that shows the words under the pointer and
leads to them in a list at the page's end.  A notebook, and a parenthesis with a link in it, keep the words in place.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

PAGES = re.compile(r"book/(intro|(start|dp|tp|cp|pp|ep|whole|hosts)/)")
WORDS = re.compile(r" ?\(((?:derived|simulated|virtual|counted|measured|quoted)\b[^()]*)\)")
_CLOSED = (nodes.title, nodes.literal, nodes.reference, nodes.raw)


def mark_sources(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Replace the parentheses of a page by marks, and list their words at its end."""
    if not PAGES.match(page) or app.builder.format != "html":
        return
    numbers: dict[str, int] = {}
    for paragraph in list(doctree.findall(nodes.paragraph)):
        _join_lines(paragraph)
        for text in list(paragraph.findall(nodes.Text)):
            if text.parent is not None and not isinstance(text.parent, _CLOSED) and WORDS.search(text):
                text.parent.replace(text, _pieces(text.astext(), numbers))
    if numbers:
        entries = [nodes.list_item("", nodes.paragraph(text=words), ids=[_id(n)]) for words, n in numbers.items()]
        listed = nodes.enumerated_list("", *entries, enumtype="loweralpha", prefix="", suffix=".")
        title = nodes.paragraph(text="Where the numbers come from")
        sections = [node for node in doctree.children if isinstance(node, nodes.section)]
        (sections[-1] if sections else doctree).append(nodes.container("", title, listed, classes=["dp-sources"]))


def _join_lines(paragraph: nodes.Element) -> None:
    """Make one text of neighbours, which the lines of a paragraph are."""
    for place in range(len(paragraph) - 1, 0, -1):
        first, second = paragraph[place - 1 : place + 1]
        if isinstance(first, nodes.Text) and isinstance(second, nodes.Text):
            paragraph[place - 1 : place + 1] = [nodes.Text(first.astext() + second.astext())]


def _pieces(text: str, numbers: dict[str, int]) -> list[nodes.Node]:
    """Return the text with a mark for each parenthesis; equal words have one letter."""
    found: list[nodes.Node] = []
    start = 0
    for match in WORDS.finditer(text):
        words = " ".join(match[1].split())
        number = numbers.setdefault(words, len(numbers) + 1)
        link = nodes.reference("", _letter(number), internal=True, refid=_id(number), reftitle=words)
        found += [nodes.Text(text[start : match.start()]), nodes.inline("", "", link, classes=["dp-mark"])]
        start = match.end()
    return [*found, nodes.Text(text[start:])]


def _letter(number: int) -> str:
    """The mark, which must not read as an exponent: a, b, ..."""
    return chr(ord("a") + number - 1)


def _id(number: int) -> str:
    return f"source-{number}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Run after the glossary's links, which stay outside of the marks."""
    app.connect("doctree-resolved", mark_sources, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
