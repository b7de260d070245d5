"""The schedule studio in a browser: writing, dragging and breaking a schedule, by keyboard, pointer and finger."""

import pytest
from drawing_page import check_accessibility
from studio_page import (
    READY,
    act,
    board,
    cell,
    connect,
    message,
    open_studio,
    press,
    rows,
    small_page,
    studio,
    verdict,
    with_challenges,
)

from dualpipe_lab import pp
from dualpipe_lab.pp import Cost, Program, schedules

pytestmark = pytest.mark.browser


def test_the_first_verdict_is_there_without_python_and_the_first_edit_asks_it(page):
    open_studio(page)
    assert not studio(page, "e.isAwake")
    assert verdict(page).startswith("Valid: 33 ticks")
    act(page, "retype", "0B0 0F0 0F1 0B1")
    assert verdict(page) == "7 problems: it cannot run."
    problems = page.locator("dp-studio .problems li").all_inner_texts()
    assert problems[0].startswith("rank 0: 0B0 (position 0) comes before 0F0 (position 1)")
    assert problems[1] == "stage 0, microbatch 2: no work at all; put in its F and B"
    assert page.locator("dp-studio .headline").inner_text() == "simulated · does not run"
    assert page.locator("dp-studio .inside .table").first.inner_text() == "There are numbers as soon as it can run."
    assert studio(page, "e.timeline.view.marks.named.length") == 2
    act(page, "undo")
    act(page, "cost", {"key": "F", "value": 2})
    makespan = pp.simulate(schedules.build("1f1b", 4, 8), Cost(F=2)).makespan
    assert f"{makespan} ticks" in page.locator("dp-studio .headline").inner_text()
    assert verdict(page).startswith(f"Valid: {makespan} ticks")
    assert f"makespan, ticks\t{makespan}\t33" in page.locator("dp-studio .inside .table").first.inner_text()


def test_a_page_without_python_draws_and_edits_and_says_what_is_missing(page):
    open_studio(page, ("1f1b", 2, 2), python=False)
    act(page, "click", {"rank": 0, "position": 0})
    assert verdict(page).startswith("Valid: 9 ticks")
    press(page, "Alt+ArrowRight")
    assert rows(page)[0] == "0F1 0F0 0B0 0B1"
    assert verdict(page) == "This needs Python, which is not here: run the cell in a notebook."
    assert page.locator("dp-studio .headline").inner_text() == "simulated · not judged"
    press(page, "Enter")
    assert message(page) == verdict(page)


def test_of_many_edits_the_last_is_judged(page):
    open_studio(page, ("1f1b", 2, 2))
    page.evaluate("""() => {
      const e = document.querySelector("dp-studio"), { ask } = globalThis.dualpipePython;
      globalThis.asked = 0;
      globalThis.dualpipePython.ask = (...question) => (globalThis.asked++, ask(...question));
      for (const value of [2, 3, 4, 5]) e.act("cost", { key: "F", value });
    }""")
    assert verdict(page).startswith(f"Valid: {pp.simulate(schedules.build('1f1b', 2, 2), Cost(F=5)).makespan} ticks")
    assert page.evaluate("asked") == 2


def test_1f1b_is_built_from_nothing_by_keyboard(page):
    open_studio(page)
    page.get_by_label("Schedule", exact=True).select_option("nothing")
    for size in ("ranks", "microbatches"):
        page.get_by_label(f"{size}: to start with").press("Home")
    assert verdict(page).endswith("it cannot run.")
    expected = schedules.build("1f1b", 2, 2)
    board(page).focus()
    for rank, row in enumerate(expected.rows()):
        press(page, "End")
        for token in row.split():
            press(page, "i")
            page.keyboard.type(token)
            page.keyboard.press("Enter")
        if rank == 0:
            press(page, "ArrowDown")
    assert rows(page) == expected.rows()
    assert verdict(page).startswith("Valid: 9 ticks")


def test_dualpipe_is_broken_by_the_pointer_and_mended_by_the_proposed_move(page):
    open_studio(page, ("dualpipe", 4, 8))
    assert verdict(page).startswith("Valid: 26 ticks")
    page.mouse.move(*cell(page, 0, 0))
    page.mouse.down()
    page.mouse.move(*cell(page, 0, 6), steps=4)
    page.mouse.up()
    moved = Program("DualPipe", Program.parse("", rows(page)).ranks, num_directions=2)
    with pytest.raises(pp.InvalidProgram) as refused:
        pp.validate(moved)
    assert studio(page, "e.result.problems") == list(refused.value.problems)
    assert page.locator("dp-studio .problems li").count() == len(refused.value.problems)
    for _ in range(20):
        mend = page.locator("dp-studio .mend")
        if not mend.is_visible():
            break
        mend.click()
        studio(page, "null")
    if not verdict(page).startswith("Valid"):
        page.get_by_role("button", name="Undo").click()
    assert verdict(page).startswith("Valid")


def test_the_hint_of_a_cell_is_gone_while_it_is_dragged_and_after_it_was_dropped(page):
    open_studio(page, ("dualpipe", 4, 8))
    tip = page.locator("dp-studio .tip")
    page.mouse.move(*cell(page, 0, 1))
    assert tip.is_visible()
    page.mouse.down()
    page.mouse.move(*cell(page, 0, 6), steps=4)
    assert not tip.is_visible()
    page.mouse.up()
    page.mouse.move(*cell(page, 0, 2))
    press(page, "Control+z")  # a new drawing below a pointer that rests
    page.mouse.move(2, 2)
    assert not tip.is_visible()


def test_editing_by_keys_pairs_splits_joins_and_moves(page):
    open_studio(page, ("1f1b", 2, 2))
    board(page).focus()
    press(page, "ArrowRight", "ArrowRight", "s")  # B0 of rank 0
    assert rows(page)[0] == "0F0 0F1 0I0 0W0 0B1"
    press(page, "j")
    assert rows(page)[0] == "0F0 0F1 0B0 0B1"
    press(page, "Escape", "Home", "ArrowDown", "ArrowRight", " ", "ArrowRight", " ")
    assert studio(page, "e.session.chosen.size") == 2
    press(page, "p")
    assert rows(page)[1] == "1F0 (1F1;1B0)OVERLAP_F_B 1B1"
    press(page, "Escape", "Home", "ArrowRight", "u")
    assert rows(page)[1] == "1F0 1F1 1B0 1B1"
    press(page, "Escape", "Home", "Alt+ArrowRight")
    assert rows(page)[1] == "1F1 1F0 1B0 1B1"
    press(page, "Delete")
    assert rows(page)[1] == "1F1 1B0 1B1"
    press(page, "Escape", "Home", "p")
    assert message(page) == "a pair takes an F and a B or I, and 1 steps are chosen"
    for _ in range(30):
        press(page, "Control+z")
    assert rows(page) == schedules.build("1f1b", 2, 2).rows()
    assert page.get_by_role("button", name="Undo").is_disabled()
    for _ in range(30):
        press(page, "Control+y")
    assert rows(page)[1] == "1F1 1B0 1B1"


def test_others_are_compared_on_one_axis_with_the_same_costs(page):
    open_studio(page, ("1f1b", 4, 8))
    for name in ("zbv", "gpipe", "dualpipe"):
        act(page, "compare", name)
    names = studio(page, "e.timeline.tracks.map((track) => [track.name, track.makespan / e.fine])")
    assert names == [["1F1B", 33], ["ZBV", 25.5], ["GPipe", 33], ["DualPipe", 26]]
    act(page, "compare", "v_half")
    assert message(page) == "one axis holds the draft and 3 others; remove one first"
    page.locator("dp-studio summary", has_text="Compare").click()
    page.get_by_role("button", name="Remove ZBV").click()
    assert studio(page, "e.timeline.tracks.length") == 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_and_a_phone_need_not_scroll_sideways(page, theme):
    with_challenges(page, theme)
    for summary in page.locator("dp-studio details.section:not([open]) > summary").all()[::-1]:
        summary.click()
    act(page, "challenge", 0)
    check_accessibility(page)
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_finger_moves_a_cell(browser, tmp_path):
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True)
    connect(context)
    page = context.new_page()
    page.goto(small_page(tmp_path))
    page.wait_for_function(READY)
    (x, y), (to, _) = cell(page, 0, 0), cell(page, 0, 1)
    touch = context.new_cdp_session(page)
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for step in range(1, 5):
        at = {"x": x + (to + 8 - x) * step / 4, "y": y}
        touch.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [at]})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert rows(page)[0] == "0F1 0F0 0B0 0B1"
    context.close()


def test_a_draft_is_there_again_after_its_page_was_closed(browser, tmp_path):
    address, context = small_page(tmp_path), browser.new_context()
    connect(context)

    def opened():
        page = context.new_page()
        page.goto(address)
        page.wait_for_function(READY)
        return page, page.get_by_role("button", name="Take up your last draft")

    first, offered = opened()
    assert not offered.is_visible()
    act(first, "retype", "0F1 0F0 0B0 0B1")
    act(first, "limit", 2)
    first.close(run_before_unload=True)
    unchanged, offered = opened()
    act(unchanged, "start", {"name": "gpipe", "ranks": 2, "microbatches": 2})
    act(unchanged, "undo")
    unchanged.close(run_before_unload=True)  # what nobody has changed is no draft
    later, offered = opened()
    assert rows(later) == schedules.build("1f1b", 2, 2).rows()
    offered.click()
    assert rows(later)[0] == "0F1 0F0 0B0 0B1"
    assert studio(later, "e.session.limit") == 2
    assert not offered.is_visible()
    context.close()


def test_a_press_explains_while_the_drawing_plays(page):
    open_studio(page)
    page.get_by_role("button", name="Explain and play").click()
    page.mouse.click(*cell(page, 1, 0))
    assert message(page) == "1F0 starts at 1: rank 1 waits 1 tick before 1F0 for the activation of 0F0 from rank 0"
    assert studio(page, "e.timeline.selection") == "1F0"
    press(page, "Home")
    assert studio(page, "e.timeline.time") == 0
    page.get_by_role("button", name="Explain and play").click()
    press(page, "Delete")
    assert rows(page)[1].startswith("1F1")


def test_costs_of_each_stage_are_typed_and_a_limit_is_drawn(page):
    open_studio(page, ("1f1b", 2, 4))
    page.locator("dp-studio summary", has_text="Size, costs and memory").click()
    field = page.get_by_label("W of each stage")
    field.fill("1 3")
    field.press("Enter")
    expected = pp.simulate(schedules.build("1f1b", 2, 4), Cost(W=[1, 3]))
    assert studio(page, "e.result.figures.makespan") == expected.makespan
    field.fill("1 2 3")
    field.press("Enter")
    assert message(page) == "W lists 3 stages, the program has 2; give one per stage"
    room = page.get_by_label("Live activations that each rank has room for")
    room.fill("1")
    room.press("Tab")
    assert verdict(page) == "1 problem: there is no room for it."
    assert studio(page, "e.result.problems") == [
        "rank 0, position 1: 0F1 makes it hold 2 activations, the bound is 1; run a backward first"
    ]
    assert studio(page, "e.timeline.tracks[0].room") == 1


def test_a_draft_that_cannot_run_is_drawn_with_streams_memory_and_another_beside_it(page):
    open_studio(page, ("1f1b", 2, 4))
    act(page, "compare", "gpipe")
    act(page, "cost", {"key": "latency", "value": 2})
    act(page, "point", {"rank": 0, "position": 0})
    act(page, "retype", "0F0 0B0 0F1 0F2 0B1 0F3 0B2 0B3")
    act(page, "point", {"rank": 1, "position": 0})
    act(page, "retype", "1F0 1F1 1B0 1B1 1F2 1B2 1F3 1B3")
    assert studio(page, "e.result.circle.length") == 2
    page.evaluate(
        """() => {
            const { timeline } = document.querySelector("dp-studio");
            Object.assign(timeline, { streams: true, memory: "all", colourBy: "stage" });
            timeline.time = 1;
        }"""
    )
    shown = studio(page, "e.timeline.tracks.map((track) => [track.name, track.stop, track.messages.length])")
    assert shown == [["1F1B", 4, 1], ["GPipe", None, 8]]  # 0F0 arrives, and what it begins ends at 4
    assert studio(page, "e.timeline.toSvg()").count("never runs") == 1
    act(page, "undo")
    act(page, "undo")
    assert studio(page, "e.timeline.tracks[0].stop") is None
