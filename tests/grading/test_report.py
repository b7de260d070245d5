"""The page of grades: a grid for each notebook with counts, messages that begin in the open, and a phone's width."""

import csv
import io
from dataclasses import replace

import pytest
from rich.console import Console

from dualpipe_course.grading.grader import Graded, Mark
from dualpipe_course.grading.replay import Replayed
from dualpipe_course.grading.report import screen, write_gradebook, write_html

LONG = "rank 1 raised ModuleNotFoundError: No module named " + "somewhere_" * 30


def graded(learner, *statuses):
    marks = [
        Mark(f"gpipe-{number}", float(status == "right"), 1, status, LONG if status == "error" else "because", 0.1)
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
    assert "error" in str(screen(RESULTS).renderables[0].title)


def test_the_gradebook_has_a_row_for_each_learner_and_points_in_its_head(tmp_path):
    again = replace(graded("anna", "wrong", "right"), marks=graded("anna", "wrong", "right").marks[:2])
    other = Graded(
        "anna", "zero-1", "d", [Mark("zero_1-10", 1.5, 3, "wrong", "", 0), Mark("zero_1-9", 2, 2, "right", "", 0)], []
    )
    formula = graded('=HYPERLINK("x")', "right")
    write_gradebook([*RESULTS, again, other, formula], tmp_path / "gradebook.csv")
    with (tmp_path / "gradebook.csv").open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert head == [
        "learner",
        "gpipe-1 [1]",
        "gpipe-2 [1]",
        "gpipe-3 [1]",
        "zero_1-9 [2]",
        "zero_1-10 [3]",
        "total [8]",
    ]
    assert rows == [
        ["anna", "1", "1", "0", "2", "1.5", "5.5"],
        ["a" * 60, "1", "0", "0", "", "", "1"],
        ["empty", "", "", "", "", "", "0"],
        ['\'=HYPERLINK("x")', "1", "", "", "", "", "1"],
    ]


@pytest.mark.browser
def test_the_page_fits_a_phone(tmp_path, browser):
    write_html(RESULTS, tmp_path / "grades.html")
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((tmp_path / "grades.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_a_note_that_most_share_stands_once_below_the_table_and_notes_have_room(tmp_path):
    shared = "no seed of personal numbers: judged by the book's, whose answers are published"
    own = "answer-gpipe-1 occurs 2 times: 1 of these cells count, those before the check"
    results = [replace(one, notes=[shared]) for one in RESULTS[:2]] + [replace(graded("zoe", "right"), notes=[own])]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen([replace(one, replayed=Replayed("unreadable", "")) for one in results]))
    told = console.export_text()
    assert " ".join(told.split()).count(f"2 of 3 submissions: {shared}") == 1
    assert told.count("no seed") == 1
    assert f"zoe, gpipe: {own}" in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 80
    assert told.count("│ unreadable │") == 3
    write_html(results, tmp_path / "grades.html")
    html = (tmp_path / "grades.html").read_text()
    assert html.count("no seed") == 1
    assert html.index("</table><p>2 of 3 submissions: no seed") > html.index(own)
    write_html(results[:1], tmp_path / "one.html")
    assert "submissions: no seed" not in (tmp_path / "one.html").read_text()
