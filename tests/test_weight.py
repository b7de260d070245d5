"""What the built book moves, what its search shows, and whether ten kinds of pages can be read by everybody."""

import pytest
from built_pages import DESK, PHONE, Visit, serious_defects

pytestmark = pytest.mark.browser

KINDS = {
    "home": "book/intro",
    "trail chapter": "book/dp/zero-1",
    "live timeline": "book/pp/gpipe",
    "studio": "book/pp/studio",
    "explorer": "book/pp/explorer",
    "exercise": "exercises/pp/gpipe",
    "reference": "book/appendix/api/cp",
    "glossary": "book/appendix/glossary",
    "paths": "book/paths",
    "search": "search",
}
MOVED = """() => ["navigation", "resource"].flatMap(type => performance.getEntriesByType(type))
  .reduce((sum, entry) => sum + entry.transferSize, 0)"""
# Letters as high as they are seen: a drawing may be smaller than it was made.
SMALL = """() => {
  const found = new Map();
  const visit = (root) => {
    for (const element of root.querySelectorAll("*")) {
      if (element.shadowRoot) visit(element.shadowRoot);
      const words = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent.trim()).join("");
      if (!words || element.closest("mjx-container, script, style, noscript") || !element.checkVisibility()) continue;
      const matrix = element instanceof SVGElement ? element.getScreenCTM?.() : null;
      const size = parseFloat(getComputedStyle(element).fontSize) * (matrix ? Math.hypot(matrix.a, matrix.b) : 1);
      const box = element.getBoundingClientRect();
      if (size < 10.95 && box.width > 1 && box.height > 1) found.set(`${element.tagName} ${words.slice(0, 40)}`, size);
    }
  };
  visit(document);
  return [...found].slice(0, 8);
}"""


@pytest.fixture
def visit(browser, site):
    """A reader's first visit: nothing is in the browser's cache."""
    visit = Visit(browser, site)
    yield visit
    visit.context.close()


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def opened(browser, site, request):
    """One page of a kind, with all that loads late."""
    visit = Visit(browser, site).open(request.param)
    if request.param == "search":
        search(visit, "bubble")
    yield visit
    visit.context.close()


def search(visit, words):
    visit.page.goto(f"{visit.site}search.html?q={words}", wait_until="networkidle")
    visit.page.wait_for_selector("ul.search li")


def test_a_chapter_moves_two_megabytes_at_first_and_a_third_of_one_afterwards(visit):
    assert visit.open("book/pp/gpipe").page.evaluate(MOVED) < 2_000_000
    for path in ("book/pp/one-f-one-b", "book/cp/ring-attention", "book/dp/zero-1"):
        assert visit.open(path).page.evaluate(MOVED) < 300_000, path


def test_a_search_moves_a_megabyte_and_shows_definitions_then_chapters_then_the_reference(visit):
    search(visit, "bubble")
    assert visit.page.evaluate(MOVED) < 1_000_000
    headings = visit.page.locator("#search-results h2:has(+ ul)").all_inner_texts()
    assert headings[:2] == ["Definitions", "Chapters"]
    assert headings[-1] == "Reference"
    first = visit.page.locator("#search-results li").first
    assert first.locator("a").inner_text() == "bubble"
    assert len(first.locator("p").inner_text()) > 40
    assert visit.complaints == []


def test_icons_and_formulas_need_no_script(browser, site):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}book/pp/gpipe.html")
    assert page.locator("mjx-container").count() > 0
    assert page.locator("mjx-container math").count() == page.locator("mjx-container").count()
    context.close()


def test_axe_finds_nothing_serious_on_the_whole_page(opened):
    opened.look(DESK, "light")
    assert serious_defects(opened.page) == []
    opened.look(DESK, "dark")
    assert serious_defects(opened.page, runOnly=["color-contrast"]) == []


def test_text_has_eleven_pixels_on_a_phone_and_bars_say_what_is_in_them(opened):
    opened.look(PHONE, "light")
    assert opened.page.evaluate(SMALL) == []
    assert "Show code cell source" not in opened.page.content()
