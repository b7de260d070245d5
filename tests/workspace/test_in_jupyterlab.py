"""`make lab` as a learner meets it: a start page, contents, no question, pictures before anything has run."""

import hashlib
import sys

import nbformat
import pytest
from lab_server import IS_READY, SECONDS, LabPage, LabServer
from small_course import Course

from dualpipe_lab import schedules, simulate
from dualpipe_lab.viz.embed import timeline_html

pytestmark = pytest.mark.browser
CODE = "from dualpipe_lab import schedules, simulate\nsimulate(schedules.gpipe(num_ranks=2, num_microbatches=2))"
OPTIONS = ("--no-browser", "--ip=127.0.0.1", "--port=0", "--LabApp.expose_app_in_browser=True")
SHOWN = "() => [...document.querySelectorAll('.jp-MarkdownViewer a')].some(link => link.innerText === 'Two')"
ASKED = "[...document.querySelectorAll('.jp-Dialog, .Toastify__toast')].map(one => one.innerText)"
PANEL = "() => document.querySelector('#table-of-contents')?.innerText.includes('Pipeline parallelism')"
LISTED = "[...document.querySelectorAll('.jp-DirListing-itemText')].map(one => one.innerText)"
PLAYS = "() => document.querySelector('.jp-OutputArea-output > dp-timeline')?.screen?.cells === 8"


def state(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """The first screen of a checkout whose second chapter was built."""
    folder = tmp_path_factory.mktemp("learner")
    course = Course(folder / "checkout")
    course.page("book/pp/two", "# Two", CODE)
    html = timeline_html(simulate(schedules.gpipe(num_ranks=2, num_microbatches=2)))
    course.built("book/pp/two", CODE, outputs=[nbformat.v4.new_output("execute_result", {"text/html": html})])
    command = [sys.executable, "-m", "dualpipe_lab", "lab", f"--course={course.path}", f"--to={folder / 'notebooks'}"]
    server = LabServer(folder, command=[*command, *OPTIONS])
    try:
        server.url, server.before, server.checkout = server.address(), state(course.path), course.path
        page = LabPage(browser, server)
        page.page.goto(f"{server.url}?token={server.token}")
        page.page.wait_for_function(SHOWN, timeout=1000 * SECONDS)
        yield page
        page.context.close()
    finally:
        left = server.stop()
    assert left == []


def test_the_first_screen_is_the_start_page_with_contents_and_no_question(lab):
    lab.page.wait_for_function(PANEL, timeout=1000 * SECONDS)
    assert lab.page.evaluate(LISTED) == [
        "1-pipeline-parallelism",
        "2-tensors-more",
        "about",
        "mine",
        "AGENTS.md",
        "intro.ipynb",
        "start.md",
        "trainer.svg",
    ]
    assert lab.page.evaluate(ASKED) == []
    assert lab.strangers() == []


def test_a_chapter_shows_its_picture_before_it_has_run_and_running_it_changes_no_file_of_the_course(lab):
    lab.page.get_by_role("link", name="Two").click()
    lab.page.wait_for_function(PLAYS, timeout=1000 * SECONDS)
    cell = "jupyterapp.shell.currentWidget.content.widgets[1].model.executionCount"
    assert lab.page.evaluate(cell) is None
    place = lab.server.notebooks / "1-pipeline-parallelism" / "s02-two.ipynb"
    lab.until(IS_READY, "the kernel is idle")
    lab.page.evaluate("() => void jupyterapp.commands.execute('notebook:run-all-cells')")
    lab.until(f"() => {cell} === 1", "the cell has run")
    lab.page.evaluate("() => void jupyterapp.commands.execute('docmanager:save')")
    lab.until("() => !jupyterapp.shell.currentWidget.context.model.dirty", "the notebook is saved")
    assert nbformat.read(place, as_version=4).cells[1].execution_count == 1
    assert not place.with_suffix(".md").exists()
    assert state(lab.server.checkout) == lab.server.before
    assert lab.page.evaluate(ASKED) == []
