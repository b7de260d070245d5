"""The built pages in a real browser: nothing is fetched from elsewhere, nothing is broken, nothing sticks out."""

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.browser
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def toc_pages():
    """Every page of the table of contents, as its path without the suffix."""
    lines = (ROOT / "_toc.yml").read_text().splitlines()
    return [line.split(": ")[1].removesuffix(".md") for line in lines if line.endswith(".md")]


@pytest.fixture
def visit(browser, site):
    """Open a page and return it with everything it complained about."""
    contexts = []

    def open_page(path, viewport, scheme="light"):
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        page, complaints = context.new_page(), []
        page.on("request", lambda r: r.url.startswith((site, "data:")) or complaints.append(f"fetched {r.url}"))
        page.on("response", lambda r: r.status < 400 or complaints.append(f"{r.status} {r.url}"))
        page.on("pageerror", lambda error: complaints.append(f"script error: {error}"))
        page.on("console", lambda m: m.type != "error" or complaints.append(f"console: {m.text}"))
        page.goto(f"{site}{path}.html", wait_until="networkidle")
        return page, complaints

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("path", toc_pages())
def test_page_is_complete_without_a_network_and_fits_a_phone(visit, path):
    page, complaints = visit(path, PHONE, "dark")
    assert complaints == []
    assert page.locator("article h1").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def serious_defects(page, **options):
    # every word of highlighted code is an element, and its colours are the theme's: axe would take a minute there
    context = {"include": [["article"]], "exclude": [["pre"]]}
    violations = Axe().run(page, context=context, options=options or None).response["violations"]
    serious = [v for v in violations if v["impact"] in ("serious", "critical")]
    return [(v["id"], v["nodes"][0]["html"][:200]) for v in serious]


# the reference is generated, like in form throughout, and takes axe half a minute
@pytest.mark.parametrize("path", [path for path in toc_pages() if not path.endswith("/api")])
def test_page_has_no_serious_accessibility_defect_of_its_own(visit, path):
    assert serious_defects(visit(path, DESK)[0]) == []
    assert serious_defects(visit(path, DESK, "dark")[0], runOnly=["color-contrast"]) == []


def test_formulas_are_set_from_local_files(visit):
    page, complaints = visit("book/appendix/notation", DESK)
    page.wait_for_selector("mjx-container")
    assert complaints == []
    assert page.locator("mjx-container").count() > 30


def test_home_page_shows_the_dualpipe_picture_with_its_numbers(visit):
    page, _ = visit("book/intro", DESK)
    timeline = page.locator("dp-timeline").first
    timeline.get_by_text("66 ticks").first.wait_for()
    assert timeline.bounding_box()["width"] <= DESK["width"]


def test_executed_pages_offer_their_notebook_and_no_dead_buttons(visit):
    page, _ = visit("book/intro", DESK)
    links = [link.get_attribute("href") or "" for link in page.locator("a").all()]
    assert "../_sources/book/intro.ipynb" in links
    assert not any("/ORG/" in link for link in links)


def test_search_finds_a_page_by_its_words(visit, site):
    page, _ = visit("search", DESK)
    page.goto(f"{site}search.html?q=makespan", wait_until="networkidle")
    page.wait_for_selector("ul.search li a")
    assert "notation" in " ".join(link.get_attribute("href") for link in page.locator("ul.search li a").all())
