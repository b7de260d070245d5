"""The page of grades: a grid for each notebook with counts, messages that begin in the open, and a phone's width."""

import pytest

from dualpipe_course.grading.grader import Graded, Mark
from dualpipe_course.grading.report import screen, write_html

LONG = "rank 1 raised ModuleNotFoundError: No module named " + "somewhere_" * 30


def graded(learner, *statuses):
    marks = [
        Mark(f"gpipe-{number}", status == "right", 1, status, LONG if status == "error" else "because", 0.1)
        for number, status in enumerate(statuses, 1)
    ]
    return Graded(learner, "gpipe", "d", marks, [])


RESULTS = [
    graded("anna", "right", "wrong", "error"),
    graded("a" * 60, "right", "stopped", "not started"),
    Graded("empty", "", "d", [], ["no notebook"]),
]


def test_the_grid_counts_who_is_right(tmp_path):
    write_html(RESULTS, tmp_path / "grades.html")
    html = (tmp_path / "grades.html").read_text()
    assert html.count('<div class="grid"') == 1
    assert '<th scope="row">right</th><td>2 of 2</td><td>0 of 2</td><td>0 of 2</td><td>2</td>' in html
    assert 'title="gpipe-3: error, 0 of 1">!</td>' in html
    assert f"gpipe-3: error, 0 of 1, 0.1 s; {LONG[:100]} ...</summary>" in html
    assert "error" in str(screen(RESULTS).title)


@pytest.mark.browser
def test_the_page_fits_a_phone(tmp_path, browser):
    write_html(RESULTS, tmp_path / "grades.html")
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((tmp_path / "grades.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()
