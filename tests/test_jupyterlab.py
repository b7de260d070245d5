"""JupyterLab and Notebook 7: drawings play beside a kernel, live cells talk to it, saved drawings play without one."""

import nbformat
import pytest
from lab_server import LabPage, LabServer

from dualpipe_lab import Cost, schedules, simulate

pytestmark = pytest.mark.browser

CELLS = (
    "from dualpipe_lab import schedules, simulate\n"
    'timeline = simulate(schedules.build("1f1b", num_ranks=4, num_microbatches=8))\n'
    "timeline",
    'from dualpipe_lab.viz import play\nlive = play(["1f1b", "dualpipe"], num_microbatches=(1, 8, 24))\nlive',
    'from dualpipe_lab.viz import Studio\nStudio(("1f1b", 2, 2), ranks=[2], microbatches=[2])',
)
ONE_F_ONE_B = schedules.build("1f1b", num_ranks=4, num_microbatches=8)
ELEMENT = ".jp-OutputArea-output > dp-timeline"
STATE = "e => ({ time: e.time, playing: e.playing, selection: e.selection, makespan: e.makespan })"


@pytest.fixture(scope="module", params=["lab", "notebook"])
def server(tmp_path_factory, request):
    """JupyterLab or Notebook 7 in an empty folder; no process of it may stay."""
    pytest.importorskip("jupyterlab" if request.param == "lab" else "notebook")
    server = LabServer(tmp_path_factory.mktemp("lab"), request.param)
    try:
        server.url = server.address()
        yield server
    finally:
        left = server.stop()
    assert left == []


@pytest.fixture(scope="module")
def lab(browser, server, request):
    """A notebook whose cells have run in a real kernel, saved; a failing test leaves a picture."""
    yield from opened(browser, server, request, lambda lab: lab.open(server.write("drawings.ipynb", *CELLS)).run())


@pytest.fixture
def other(browser, lab, request):
    """JupyterLab in another, fresh browser profile."""
    yield from opened(browser, lab.server, request)


def opened(browser, server, request, prepare=lambda lab: None):
    lab, failed = LabPage(browser, server), request.session.testsfailed
    try:
        prepare(lab)
        yield lab
    finally:
        if request.session.testsfailed > failed or not lab.is_open:
            print(f"what JupyterLab showed: {lab.picture()}")
        lab.context.close()
    assert lab.strangers() == []


def drawing(lab, place):
    """The one drawing at a place, when all its cells are drawn."""
    lab.until(f"() => document.querySelector('{place}')?.screen?.cells === {len(list(ONE_F_ONE_B))}", "cells are drawn")
    return lab.page.locator(place).element_handle()


def press(lab, element, *keys):
    element.evaluate("e => e.scroller.focus()")
    for key in keys:
        lab.page.keyboard.press(key)
    return element.evaluate(STATE)


def check_that_keys_move(lab, element):
    """A drawing steps, jumps, plays and shows a critical path; JupyterLab takes none of its keys."""
    assert press(lab, element, "Home")["time"] == 0
    assert press(lab, element, "ArrowRight", "ArrowRight")["time"] == 2
    press(lab, element, "Space")
    lab.until("e => e.playing && e.time > 2", "the drawing plays", element)
    assert press(lab, element, "Space")["playing"] is False
    assert press(lab, element, "End")["time"] == simulate(ONE_F_ONE_B).makespan
    assert press(lab, element, "ArrowDown", "Enter")["selection"] == "0B7"
    assert press(lab, element, "Escape")["selection"] == ""
    element.evaluate("e => e.shadowRoot.querySelector('.costs input').focus()")
    lab.page.keyboard.press("ArrowRight")
    assert element.evaluate(STATE)["makespan"] == simulate(ONE_F_ONE_B, Cost(F=2)).makespan
    assert lab.cells() == len(CELLS)


def test_the_element_plays_beside_a_kernel(lab):
    check_that_keys_move(lab, drawing(lab, ELEMENT))


def test_the_studio_asks_the_kernel(lab):
    studio = lab.page.locator("dp-studio").element_handle()
    lab.until("e => e.timeline?.tracks", "the studio is drawn", studio)
    studio.evaluate("e => e.act('retype', '0B0 0F0 0F1 0B1')")
    lab.until("e => e.result", "the kernel has answered", studio)
    assert studio.evaluate("e => e.result.problems[0]").startswith("rank 0: 0B0 (position 0) comes before 0F0")


# ---- live cells

HERE = "e => ({ found: e.table.innerText, told: e.status.innerText, hint: !e.hint.hidden, makespan: e.drawn.makespan })"


def live_cell(lab, is_bound=True):
    """A live cell, when its controls are there, or when it has said that there are none."""
    wanted = f"e => e?.drawn?.screen?.cells && !!e.querySelector('.jupyter-widgets') === {str(is_bound).lower()}"
    lab.until(f"() => ({wanted})(document.querySelector('dp-live'))", "the live cell is drawn")
    return lab.page.locator("dp-live").element_handle()


def test_the_controls_of_a_live_cell_move_drawing_numbers_and_verdict(lab):
    cell = live_cell(lab)
    ranks = lab.page.get_by_role("slider", name="num_ranks").first
    ranks.press("ArrowRight")
    timeline = simulate(schedules.build("1f1b", num_ranks=5, num_microbatches=8))
    lab.until(f"e => e.drawn.makespan === {timeline.makespan}", "the drawing follows", cell)
    shown = cell.evaluate(HERE)
    assert f"{timeline.makespan} ticks\t{timeline.makespan} ticks" in shown["found"]
    assert f"{timeline.bubble_fraction:.1%}" in shown["found"]
    assert "5 on rank 0" in shown["found"]
    assert shown["told"].startswith("The validator accepts")
    assert not shown["hint"]
    lab.page.get_by_role("combobox", name="schedule", exact=True).select_option("dualpipe")
    lab.until("e => e.status.innerText.startsWith('dualpipe needs an even number of ranks, got 5')", "a refusal", cell)
    assert cell.evaluate("e => e.table.hidden && e.drawn.makespan") == timeline.makespan
    ranks.press("ArrowLeft")
    lab.until("e => e.status.innerText.startsWith('The validator') && e.drawn.name === 'DualPipe'", "it is back", cell)
    lab.told("live.values['num_ranks'], live.error", "(4, '')")


def test_axe_finds_nothing_serious_in_live_cells(lab):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    live_cell(lab)
    found = axe.Axe().run(lab.page, context="dp-live").response["violations"]
    assert [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")] == []


def test_a_saved_live_cell_shows_its_drawing_and_what_to_run(lab, other):
    saved = nbformat.read(lab.server.notebooks / "drawings.ipynb", as_version=4)
    assert sorted(saved.cells[1].outputs[0].data) == ["text/html", "text/plain"]
    other.open(lab.server.copy("drawings.ipynb", "live.ipynb"))
    shown = live_cell(other, is_bound=False).evaluate(HERE)
    assert shown["makespan"] == simulate(schedules.build("1f1b", 4, 8)).makespan
    assert shown["hint"]
    assert "33 ticks" in shown["found"]


# ---- without a kernel


def test_a_saved_drawing_plays_in_a_notebook_that_has_not_run(lab, other):
    other.open(lab.server.copy("drawings.ipynb", "reopened.ipynb"))
    check_that_keys_move(other, drawing(other, ELEMENT))
    assert other.ask("'timeline' in globals()") == "False"


def test_an_untrusted_notebook_shows_the_picture(lab, other):
    def change(notebook):
        notebook.cells.append(nbformat.v4.new_markdown_cell("Written by somebody else."))

    other.open(lab.server.copy("drawings.ipynb", "untrusted.ipynb", change))
    picture = other.page.locator(".jp-OutputArea-output img").first
    picture.wait_for()
    assert picture.get_attribute("alt") == "Timeline of 1F1B"
    assert picture.bounding_box()["width"] > 400
    assert other.page.locator(f"{ELEMENT} .play").count() == 0
