"""The trail in the built book: its numbers in the sidebar, and the way that *Next* leads."""

import itertools

import pytest
import yaml
from bs4 import BeautifulSoup
from built_pages import HTML, ROOT

META = yaml.safe_load((ROOT / "_toc.yml").read_text())["meta"]
TRAIL = [page.removesuffix(".md") for page in META["trail"]]
LECTURE = {page.removesuffix(".md") for page in META["lecture"]}

pytestmark = pytest.mark.browser


def opened(page):
    """The page's tree."""
    return BeautifulSoup((HTML / f"{page}.html").read_text("utf-8"), "html.parser")


def led_to(page, way):
    """The page to which the foot of another leads."""
    link = opened(page).select_one(f".prev-next-footer a.{way}")
    target = ((HTML / page).parent / link["href"]).resolve().relative_to(HTML.resolve())
    return target.as_posix().removesuffix(".html")


@pytest.mark.parametrize("page", ["book/intro", "book/pp/dualpipe", "exercises/tp/gqa", "book/learners"])
def test_the_sidebar_numbers_the_trail_and_names_the_lecture_s_pages(page):
    links = opened(page).select(".bd-sidebar-primary li.toctree-l1 > a")
    names = {(HTML / page).parent.joinpath(link["href"]).resolve(): link for link in links if link["href"] != "#"}
    names |= {(HTML / f"{page}.html").resolve(): link for link in links if link["href"] == "#"}
    marked = {path: (link.select_one(".dp-number"), link.select_one(".dp-lecture")) for path, link in names.items()}
    numbers = {path: int(number.text) for path, (number, _) in marked.items() if number}
    assert numbers == {(HTML / f"{name}.html").resolve(): place for place, name in enumerate(TRAIL, 1)}
    assert {path for path, (_, word) in marked.items() if word} == {(HTML / f"{n}.html").resolve() for n in LECTURE}


def test_next_and_previous_follow_the_numbers_and_exercises_lead_on():
    assert [led_to(page, "right-next") for page in TRAIL[:-1]] == TRAIL[1:]
    assert [led_to(page, "left-prev") for page in TRAIL] == ["book/intro", *TRAIL[:-1]]
    for page, after in itertools.pairwise(TRAIL):
        exercises = page.replace("book/", "exercises/", 1)
        assert (led_to(exercises, "left-prev"), led_to(exercises, "right-next")) == (page, after)
