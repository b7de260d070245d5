"""Printed pages: drawings are their static pictures, nothing that can only be clicked is left, and paper is light."""

import pytest
from built_pages import DESK, Visit, drawn_pages

pytestmark = pytest.mark.browser
VISIBLE = "all => all.filter(e => e.checkVisibility()).map(e => e.outerHTML.slice(0, 120))"
CONTROLS = "main :is(button, input, summary.toggle-details__summary), .bd-header, .bd-sidebar-primary"
DRAWN = "() => [...document.querySelectorAll('dp-timeline, dp-steps')].every(e => e.frame)"
PICTURES = """() => [...document.querySelectorAll("dp-timeline, dp-steps")].map(e => {
  const pictures = [...e.querySelectorAll("img")].map(img => img.checkVisibility() && img.naturalWidth > 0);
  return { live: e.frame.checkVisibility(), pictures };
})"""


@pytest.fixture(scope="module", params=drawn_pages())
def opened(browser, site, request):
    """One page with drawings, as a reader in dark mode would print it."""
    visit = Visit(browser, site).open(request.param, DESK, "dark")
    visit.page.wait_for_function(DRAWN)
    yield visit
    visit.context.close()


def test_drawings_print_as_pictures_without_controls(opened):
    opened.page.emulate_media(media="print")
    for drawing in opened.page.evaluate(PICTURES):
        assert drawing["live"] is False
        assert drawing["pictures"]
        assert all(drawing["pictures"])
    controls = opened.page.locator(CONTROLS)
    assert controls.count() > 0
    assert controls.evaluate_all(VISIBLE) == []
    opened.page.emulate_media(media="screen")


def test_pages_print_in_the_light_theme_and_return_to_theirs(opened):
    page = opened.page
    page.evaluate("addEventListener('beforeprint', () => { window.printed = document.documentElement.dataset.theme; })")
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.evaluate("[printed, document.documentElement.dataset.theme]") == ["light", "dark"]
    assert opened.complaints == []
