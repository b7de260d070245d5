"""The exercises of a page: an editor that loses nothing, what a browser keeps, what is solved, and two checks."""

import json
import os
import re
from pathlib import Path

import pytest
from built_pages import DESK, HTML, PHONE, Visit, serious_defects

from dualpipe_course.in_page import judge, run

ROOT = Path(__file__).parents[2]
GPIPE = "exercises/pp/gpipe"
ANSWER, LAST, SEED = "dualpipe-lab:answer:gpipe-7", "dualpipe-lab:last:gpipe-7", "dualpipe-lab:seed"
ROWS = """def gpipe_rows(p, m):
    return [" ".join(f"{s}{kind}{i}" for kind in "FB" for i in range(m)) for s in range(p)]


def gpipe_place(stage, microbatch):
    return stage
"""
BLOCKED = """Object.defineProperty(window, "localStorage", { get() {
  throw new DOMException("Access is denied for this document.", "SecurityError");
} });"""
FULL = 'Storage.prototype.setItem = () => { throw new DOMException("no room", "QuotaExceededError"); };'
NO_STORE = {"blocked": BLOCKED, "null": 'Object.defineProperty(window, "localStorage", { value: null });', "full": FULL}
NAMES = (ROOT / "_ext" / "in_page.txt").read_text().split()
TOLD = "This browser keeps nothing"
VERDICT = ".dp-verdict:not(.dp-printed)"
SAID = """([all, number]) => (said => said && !/^(starting|running|waiting)/.test(said))(
  document.querySelectorAll(all)[number].textContent)"""
BOTTOMS = """all => all.map(one => one.previousElementSibling.getBoundingClientRect().bottom
  - one.getBoundingClientRect().bottom)"""

browser_only = pytest.mark.browser


@pytest.fixture
def python(site):
    """The built book, if it has Python for the browser."""
    if not (HTML / "_static" / "python").exists() and "DUALPIPE_LAB_REQUIRE_BROWSER" not in os.environ:
        pytest.skip("the book was built without npm")
    return site


@pytest.fixture
def visit(browser, python):
    """A reader's first visit of an exercise page."""
    visit = Visit(browser, python).open(GPIPE)
    yield visit
    visit.context.close()


def fields(page):
    return page.locator(".dp-exercise textarea")


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def verdict(page, number, seconds=120):
    """What a check said, when it has judged."""
    page.wait_for_function(SAID, arg=[VERDICT, number], timeout=1000 * seconds)
    return page.locator(VERDICT).nth(number).inner_text()


@browser_only
def test_keys_of_the_editor_can_be_undone_and_lead_out_of_it(visit):
    page, field = visit.page, fields(visit.page).nth(1)
    field.fill("def f():\n    a = 1\nb = 2")
    field.focus()
    press(page, "Control+a", "Tab")
    assert field.input_value() == "    def f():\n        a = 1\n    b = 2"
    press(page, "Shift+Tab")
    assert field.input_value() == "def f():\n    a = 1\nb = 2"
    press(page, "Control+z")
    assert field.input_value() == "    def f():\n        a = 1\n    b = 2"
    press(page, "Control+z")
    assert field.input_value() == "def f():\n    a = 1\nb = 2"
    field.fill("")
    field.type("def f():\nif x:  # y\nreturn")
    assert field.input_value() == "def f():\n    if x:  # y\n        return"
    press(page, "Enter", "Backspace", "Backspace", "Tab")
    assert field.input_value() == "def f():\n    if x:  # y\n        return\n    "
    assert page.locator(".dp-copy").nth(1).locator("> div").count() == 4  # each with its number
    assert "Escape, then Tab leaves" in page.locator(".dp-keys:visible").inner_text()
    press(page, "Escape", "Shift+Tab")
    assert not field.evaluate("field => field === document.activeElement")
    assert visit.complaints == []
    assert serious_defects(page) == []


@browser_only
@pytest.mark.parametrize("look", [PHONE, DESK], ids=["phone", "desk"])
def test_an_editor_is_as_high_as_what_is_drawn(visit, look):
    for name in ("dp/hybrid-zero", "hosts/placing", "pp/dualpipe", "whole/cuts", "pp/gpipe"):
        page = visit.open(f"exercises/{name}", look).page
        fields(page).first.fill("x = 1  # " + "a long line " * 40 + "wide" * 60)
        hidden = fields(page).evaluate_all("all => all.map(one => one.scrollHeight - one.clientHeight)")
        assert len(hidden) > 0
        assert max(hidden) <= 1, name
        assert max(map(abs, fields(page).evaluate_all(BOTTOMS))) < 1, name
        assert visit.sticking_out() == []


@browser_only
def test_start_again_can_be_undone_also_after_a_reload(visit):
    page = visit.page
    field, undo = fields(page).nth(1), page.get_by_role("button", name="Undo")
    starter = field.input_value()
    field.fill("mine = 1")
    page.get_by_role("button", name="Start again").nth(1).click()
    assert field.input_value() == starter
    visit.open(GPIPE)
    assert field.input_value() == starter
    undo.click()
    assert field.input_value() == "mine = 1"
    assert page.evaluate("key => localStorage.getItem(key)", ANSWER) == "mine = 1"
    assert undo.count() == 0


@browser_only
def test_a_solution_is_shown_once_its_exercise_is_solved(visit):
    page = visit.page
    solutions = page.locator(".dp-solution")
    assert solutions.count() == fields(page).count()
    assert page.locator(".dp-solution:visible").count() == 0
    page.evaluate("dualpipeProgress.note(['gpipe-7'])")
    visit.open(GPIPE)
    assert page.locator(".dp-solution:visible").count() == 1
    page.locator(".dp-solution:visible summary").click()
    assert "def with_messages(" in solutions.nth(1).locator("pre").inner_text()
    assert "###" not in solutions.nth(1).inner_text()
    assert serious_defects(page) == []


@browser_only
def test_two_tabs_do_not_write_over_each_other(visit):
    page, other = visit.page, visit.context.new_page()
    other.goto(f"{visit.site}{GPIPE}.html")
    fields(other).nth(1).fill("of the other tab")
    page.wait_for_function("document.querySelectorAll('.dp-exercise textarea')[1].value === 'of the other tab'")
    note, field = page.locator(".dp-note").nth(1), fields(page).nth(1)
    assert note.inner_text() == "This is now the text of another tab."
    # a tab that was asleep hears nothing, and has an answer of its own when it finds the other's
    page.evaluate("key => localStorage.setItem(key, 'written meanwhile')", ANSWER)
    field.fill("mine")
    assert page.evaluate("key => localStorage.getItem(key)", ANSWER) == "written meanwhile"
    assert "this one is not kept" in note.inner_text()
    note.get_by_text("Take the other").click()
    assert field.input_value() == "written meanwhile"
    page.get_by_role("button", name="Undo").click()
    assert field.input_value() == "mine"
    page.evaluate("key => localStorage.setItem(key, 'again')", ANSWER)
    field.fill("mine, too")
    note.get_by_text("Keep this one").click()
    assert page.evaluate("keys => keys.map(key => localStorage.getItem(key))", [ANSWER, LAST]) == ["mine, too", "again"]
    other.wait_for_function("document.querySelectorAll('.dp-exercise textarea')[1].value === 'mine, too'")


@browser_only
def test_a_full_store_is_told(visit):
    fill = """() => { for (let n = 5 * 2 ** 20; n > 0; n -= 256) {
      try { return localStorage.setItem("fill", "x".repeat(n)); } catch { /* less */ } } }"""
    visit.page.evaluate(fill)
    fields(visit.page).nth(1).fill("mine = 1\n" * 100)
    note = visit.page.locator(".dp-note").nth(1)
    assert note.inner_text() == "Not kept: this browser has no room left for this answer."
    visit.page.evaluate("localStorage.removeItem('fill')")
    fields(visit.page).nth(1).fill("mine = 1\n" * 100)
    assert note.inner_text() == ""
    assert visit.complaints == []


@browser_only
@pytest.mark.parametrize("way", NO_STORE)
def test_a_page_whose_browser_keeps_nothing_is_answered_all_the_same(browser, python, way):
    visit = Visit(browser, python)
    visit.page.add_init_script(NO_STORE[way])
    page = visit.open(GPIPE).page
    assert TOLD in page.locator(".dp-in-page").inner_text()
    assert fields(page).count() == page.get_by_role("button", name="Check").count() == 3
    fields(page).nth(1).fill("with_messages = None")
    page.get_by_role("button", name="Start again").nth(1).click()
    page.get_by_role("button", name="Undo").click()
    assert fields(page).nth(1).input_value() == "with_messages = None"
    page.evaluate("dualpipeProgress.note(['gpipe-7'])")
    assert page.locator(".dp-tick:visible").count() == 1
    if way == "blocked":
        page.get_by_role("button", name="Check").nth(1).click()
        assert verdict(page, 1).startswith("part row_messages: ")
    visit.context.close()  # the theme's own scripts complain


@browser_only
def test_a_frame_that_may_keep_nothing_is_answered_where_its_server_lets_it(visit):
    visit.page.evaluate("""() => document.body.replaceChildren(Object.assign(document.createElement("iframe"),
      { sandbox: "allow-scripts", src: location.href, width: 900, height: 900 }))""")
    frame = visit.page.frame_locator("iframe")
    frame.locator(".dp-exercise textarea").nth(1).fill("with_messages = None")
    assert TOLD in frame.locator(".dp-in-page").inner_text()
    frame.get_by_role("button", name="Check").nth(1).click()
    frame.get_by_text("the frame around this page keeps it from doing so").wait_for()


@browser_only
@pytest.mark.parametrize("seed", ["-5", "abc", "1.5", "", "1e9"])
def test_a_seed_by_another_hand_is_drawn_anew(visit, seed):
    visit.page.evaluate("pair => localStorage.setItem(...pair)", [SEED, seed])
    page = visit.open(GPIPE).page
    assert fields(page).count() == 3
    assert re.fullmatch("[1-9][0-9]{0,5}", page.evaluate("key => localStorage.getItem(key)", SEED))
    assert visit.complaints == []


@browser_only
def test_what_is_solved_is_remembered_and_travels_with_the_notebook(browser, visit, tmp_path):
    visit.page.evaluate("pair => localStorage.setItem(...pair)", [SEED, "0"])
    page = visit.open(GPIPE).page
    assert page.locator(".dp-tick:visible, .dp-count").count() == 0
    fields(page).first.fill(ROWS)
    page.get_by_role("button", name="Check").first.click()
    assert verdict(page, 0).startswith("part rows_gpipe solved: ")
    for _ in range(2):
        assert page.locator(".dp-tick:visible").get_attribute("data-exercise") == "gpipe-6"
        assert "1 of 3" in page.locator(".dp-count").all_inner_texts()
        visit.open(GPIPE)
    with page.expect_download() as handed:
        page.get_by_text("Download as notebook").click()
    handed.value.save_as(tmp_path / "gpipe.ipynb")
    notebook = json.loads((tmp_path / "gpipe.ipynb").read_bytes())
    assert notebook["metadata"]["dualpipe_lab"]["solved"] == ["gpipe-6"]
    home = visit.open("book/intro").page.locator(".dp-progress")
    assert home.inner_text() == f"1 of {len(NAMES)} exercises solved in this browser."
    other = Visit(browser, visit.site).open(GPIPE)
    other.page.locator("input[type=file]").set_input_files(tmp_path / "gpipe.ipynb")
    other.page.locator(".dp-tick:visible").wait_for()
    assert fields(other.page).first.input_value() == ROWS
    (tmp_path / "none.ipynb").write_text("{")
    other.page.locator("input[type=file]").set_input_files(tmp_path / "none.ipynb")
    other.page.get_by_text("none.ipynb is no notebook.").wait_for()
    assert visit.complaints + other.complaints == []
    other.context.close()


@browser_only
def test_of_two_checks_each_has_its_own_time_and_the_second_is_asked_again(visit):
    page = visit.page
    fields(page).first.fill("for i in range(2500): print(i)\ndef gpipe_rows(p, m): pass")
    fields(page).nth(1).fill("while True: print('mine')")
    check = page.get_by_role("button", name="Check")
    check.first.click()
    assert "rows_gpipe" in verdict(page, 0)
    printed = page.locator(".dp-printed").first
    assert printed.inner_text().splitlines()[-1].startswith("... and 2,300 more lines")
    assert printed.bounding_box()["height"] < 400
    page.evaluate("dualpipePython.seconds = 8")
    fields(page).first.fill("def gpipe_rows(p, m): return []")
    check.nth(1).click()
    check.first.click()
    assert verdict(page, 1).startswith("no result after 8 s: the answer was stopped")
    assert verdict(page, 0).startswith("part rows_gpipe: ")
    assert visit.complaints == []


@browser_only
def test_python_starts_when_an_editor_is_entered_and_is_kept_for_the_next_page(visit):
    page, took = visit.page, []
    for name in (GPIPE, "exercises/pp/one-f-one-b", "exercises/pp/zero-bubble"):
        visit.open(name)
        page.evaluate("globalThis.from = performance.now()")
        fields(page).first.focus()
        page.wait_for_function("dualpipePython.isStarted", timeout=120_000)
        took.append((page.evaluate("dualpipePython.isRestored"), page.evaluate("performance.now() - from")))
        page.wait_for_function("caches.open('dualpipe-lab-python').then(kept => kept.keys()).then(all => all.length)")
    assert [is_restored for is_restored, _ in took] == [False, True, True]
    assert min(took[1][1], took[2][1]) < took[0][1] / 2, took
    page.get_by_role("button", name="Check").first.click()
    assert verdict(page, 0).startswith("part rows_zb_h1: ")
    assert visit.complaints == []


@browser_only
def test_every_exercise_says_where_it_is_answered(site):
    texts = [path.read_text() for path in sorted((HTML / "exercises").rglob("*.html"))]
    assert sum(text.count("tag_answer-") for text in texts) == sum(text.count('class="dp-where') for text in texts)
    assert sum(text.count('class="dp-where dp-here"') for text in texts) in (0, len(NAMES))  # 0: built without npm


def test_a_flood_of_output_is_cut_and_stands_behind_the_verdict():
    flood = "print('first')\nfor i in range(300_000): print(i)\nticks = 29"
    found = json.loads(judge(["from dualpipe_course import check"], flood, "check.time.two_messages(ticks)"))
    assert found["verdict"].startswith("time-1 solved: ")
    assert found["text"].splitlines() == ["first", *map(str, range(199)), "... and 299,801 more lines"]
    long = json.loads(run("", "print('x' * 10**6)\nprint('y')\n1 / 0"))["text"]
    assert len(long) < 30_000
    assert long.endswith("... and 2 more lines\nZeroDivisionError: division by zero, line 3 of the cell\n")
