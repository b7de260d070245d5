"""The built pages in a real browser: nothing is fetched from elsewhere, nothing is broken, nothing sticks out."""

import pytest
from built_pages import DESK, HTML, LOOKS, Visit, serious_defects, toc_pages

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", params=toc_pages())
def opened(browser, site, request):
    """One page of the book, loaded once for all tests that look at it."""
    visit = Visit(browser, site).open(request.param, *LOOKS[0])
    visit.path = request.param
    yield visit
    visit.context.close()


@pytest.fixture
def visit(browser, site):
    """A page to open what one test needs."""
    visit = Visit(browser, site)
    yield visit
    visit.context.close()


def test_page_is_complete_without_a_network_and_fits_in_every_look(opened):
    for viewport, scheme in LOOKS:
        opened.look(viewport, scheme)
        assert opened.sticking_out() == [], (viewport["width"], scheme)
    assert opened.complaints == []
    assert opened.page.locator("article h1").count() == 1


def test_page_has_no_serious_accessibility_defect(opened):
    if opened.path.endswith("/api"):
        pytest.skip("the reference is generated, like in form throughout, and takes axe half a minute")
    opened.look(DESK, "light")
    assert serious_defects(opened.page) == []
    opened.look(DESK, "dark")
    assert serious_defects(opened.page, runOnly=["color-contrast"]) == []


@pytest.mark.parametrize("path", ["book/intro", "book/appendix/notation"])
def test_pages_work_without_a_server(browser, path):
    visit = Visit(browser, f"{HTML.as_uri()}/").open(path)
    assert visit.complaints == []
    drawings = visit.page.locator("dp-timeline")
    assert drawings.evaluate_all("all => all.map(e => e.screen.cells > 0)") == [True] * drawings.count()
    visit.page.goto(f"{HTML.as_uri()}/search.html?q=makespan")
    visit.page.wait_for_selector("ul.search li a")
    visit.context.close()


def test_formulas_are_set_from_local_files(visit):
    page = visit.open("book/appendix/notation").page
    page.wait_for_selector("mjx-container")
    assert visit.complaints == []
    assert page.locator("mjx-container").count() > 30


def test_executed_pages_offer_their_notebook_and_no_dead_buttons(visit):
    links = [link.get_attribute("href") or "" for link in visit.open("book/intro").page.locator("a").all()]
    assert "../_sources/book/intro.ipynb" in links
    assert not any("/ORG/" in link for link in links)


def test_search_finds_a_page_by_its_words(visit):
    page = visit.open("search").page
    page.goto(f"{visit.site}search.html?q=makespan", wait_until="networkidle")
    page.wait_for_selector("ul.search li a")
    assert "notation" in " ".join(link.get_attribute("href") for link in page.locator("ul.search li a").all())
