"""No chapter uses a word of the glossary before the page that defines the word, in the order of the contents.

The prose of a page's core counts: not code, formulas, headings, tables and the text of links (a link says where its
word is explained), and nothing after "Going deeper" or "Where it lives".  A door may name what its own part explains.
"""

import re
from pathlib import Path

import pytest
from scripts import load
from test_book import toc_files

ROOT = Path(__file__).parents[1]
CHAPTERS = [file for file in toc_files() if re.match(r"book/(start|dp|tp|pp|cp|ep|whole|hosts)/", file)]
ENTRY = re.compile(r"^((?:\S[^\n]*\n)+)  .*?Page: \[\]\(\.\./((?!appendix/)[^)]+)\)", re.MULTILINE)
# These have an everyday meaning too, in which earlier pages use them: two directions of a line, a program in Python,
# stages 1 to 3 of ZeRO, to combine two gains.
EVERYDAY = {"direction", "program", "stage", "combine"}
OUTSIDE = (
    r"\A---.*?\n---\n", r"```.*?```", r"^## (?:Going deeper|Where it lives).*", r"^#.*?$", r"^\|.*?$", r"\$\$.*?\$\$",
    r"\$[^$]*\$", r"`[^`]*`", r"\[[^\]]*\]\([^)]*\)", r"^You need .*?$",
)  # fmt: skip


def homes(glossary):
    """The page that defines each term, as a path below the repository."""
    return {term: f"book/{page}" for terms, page in ENTRY.findall(glossary) for term in terms.splitlines()}


def prose(text):
    """What a reader of a page's core reads as sentences."""
    for number, pattern in enumerate(OUTSIDE):
        flags = re.DOTALL if number < 2 else re.DOTALL | re.MULTILINE
        text = re.sub(pattern, "", text, flags=flags)
    return text


def early_words(text, page, order, home):
    """The terms that a page uses and only a later page defines."""
    glossary = load(ROOT / "_ext" / "dp_glossary.py")
    behind = page.removesuffix("door.md") if page.endswith("/door.md") else "nothing"
    known = {
        term for term, place in home.items() if place.startswith(behind) or order.index(place) <= order.index(page)
    }
    late = set(home) - known - EVERYDAY
    if not late:
        return []
    return sorted({term for _, term in glossary.split(prose(text), glossary.pattern_of(sorted(late)), late) if term})


HOMES = homes((ROOT / "book/appendix/glossary.md").read_text())


def test_every_term_has_a_page_of_the_book():
    assert len(HOMES) >= 60
    assert {term: page for term, page in HOMES.items() if page not in CHAPTERS} == {}
    assert set(HOMES) >= EVERYDAY


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_page_uses_no_word_that_a_later_page_defines(page):
    assert early_words((ROOT / page).read_text(), page, CHAPTERS, HOMES) == []


def test_the_check_sees_a_word_that_comes_too_early():
    order, home = ["book/a.md", "book/b.md"], {"bubble": "book/b.md", "rank": "book/a.md"}
    head = "---\nbubble\n---\n# Bubble\n\nA rank. `bubble`, $bubble$, a [bubble](b.md).\n\n| bubble |\n"
    assert early_words(f"{head}\n```\nbubble\n```\n\n## Going deeper\n\nBubbles.\n", "book/a.md", order, home) == []
    assert early_words(f"{head}\nTwo Bubbles.\n", "book/a.md", order, home) == ["bubble"]
    assert early_words(f"{head}\nTwo Bubbles.\n", "book/b.md", order, home) == []
