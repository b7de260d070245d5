"""The schedule studio in a browser: by keyboard and pointer, with what readers paste, and what attackers do."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from studio_answers import ANSWERS
from studio_page import act, board, cell, message, open_studio, press, rows, studio, verdict, with_challenges

from dualpipe_course import check
from dualpipe_course.pp.challenges import CHALLENGES
from dualpipe_course.pp.studio import judge
from dualpipe_course.registry import topic
from dualpipe_lab import pp
from dualpipe_lab.pp import Cost, Program, schedules

pytestmark = pytest.mark.browser


def test_1f1b_is_built_from_nothing_by_keyboard(page):
    open_studio(page)
    page.get_by_label("Schedule", exact=True).select_option("nothing")
    page.get_by_label("Ranks", exact=True).select_option("2")
    page.get_by_label("Microbatches", exact=True).select_option("2")
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


def test_actions_that_are_missing_are_offered(page):
    open_studio(page)
    act(page, "start", {"name": "", "ranks": 2, "microbatches": 2})
    group = page.get_by_role("group", name="Actions that are missing")
    assert group.get_by_role("button").all_inner_texts() == ["0F0", "0F1", "0B0", "0B1"]
    group.get_by_role("button", name="0F1").click()
    assert rows(page) == ["0F1", ""]
    assert group.get_by_role("button").all_inner_texts() == ["0F0", "0B0", "0B1"]


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
    if not verdict(page).startswith("Valid"):
        page.get_by_role("button", name="Undo").click()
    assert verdict(page).startswith("Valid")


def test_a_deadlock_is_drawn_told_and_mended(page):
    with_challenges(page)
    page.get_by_role("button", name="Mend the deadlock").click()
    program = CHALLENGES[0].program(CHALLENGES[0].start)
    with pytest.raises(pp.InvalidProgram) as refused:
        pp.validate(program)
    assert studio(page, "e.result.problems") == list(refused.value.problems)
    assert studio(page, "e.timeline.view.marks.circle.length") == 2
    assert studio(page, "e.timeline.tracks[0].stop") == 2
    page.locator("dp-studio .mend").click()
    assert verdict(page).startswith("Valid: 12 ticks")
    assert page.locator("dp-studio .judgement").inner_text() == "Solved, with the star of memory."


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


def test_a_typed_row_and_a_stage_that_moves(page):
    open_studio(page, ("1f1b", 2, 2))
    board(page).focus()
    press(page, "r")
    row = page.get_by_label("The row of the chosen rank")
    row.fill("0F0 0B0 0F1 0B1 nonsense")
    row.press("Enter")
    assert message(page).startswith("rank 0, position 4: 'nonsense' is not an action; write stage")
    assert rows(page) == schedules.build("1f1b", 2, 2).rows()
    row.fill("0F0 0B0 0F1 0B1")
    row.press("Enter")
    assert verdict(page).startswith("Valid: 12 ticks")
    act(page, "click", {"rank": 1, "position": 0})
    page.get_by_label("Move the stage of the chosen action to a rank").select_option("0")
    assert rows(page)[1] == ""


def test_csv_of_torch_goes_in_and_out(page):
    open_studio(page)
    page.locator("dp-studio summary", has_text="Text, link, files").click()
    for name in ("zbv", "interleaved", "1f1b"):
        program = schedules.build(name, 4, 8)
        act(page, "readText", pp.to_torch_csv(program))
        assert rows(page) == program.rows()
        page.get_by_label("Form").select_option("csv")
        assert pp.from_torch_csv(studio(page, "e.exporting.area.value")).ranks == program.ranks
        page.get_by_label("Form").select_option("text")
    act(page, "start", {"name": "dualpipe", "ranks": 4, "microbatches": 8})
    page.get_by_label("Form").select_option("csv")
    assert studio(page, "e.exporting.area.value").startswith("torch keeps a stage on one rank")


def test_a_link_opens_the_schedule_in_a_fresh_browser(page, browser):
    open_studio(page, ("dualpipe", 4, 8))
    act(page, "cost", {"key": "latency", "value": 3})
    act(page, "limit", 6)
    act(page, "link")
    page.wait_for_function("document.querySelector('dp-studio').exporting.link.href")
    address = studio(page, "e.exporting.link.href")
    assert len(address) < 2000
    fresh = browser.new_context().new_page()
    fresh.goto(address)
    fresh.wait_for_function("document.querySelector('dp-studio')?.figures")
    assert rows(fresh) == rows(page)
    assert studio(fresh, "[e.figures.makespan, e.session.limit, e.session.program.numDirections]") == [
        pp.simulate(schedules.build("dualpipe", 4, 8), Cost(latency=3)).makespan,
        6,
        2,
    ]
    fresh.context.close()


def test_hostile_input_gets_a_sentence_and_nothing_is_lost(page):
    open_studio(page, ("1f1b", 2, 2))
    before = rows(page)
    act(page, "readText", "0F0 " * 2_500_000)
    assert message(page) == ("the text has 10000000 characters; the studio reads at most 4000000, use a smaller size")
    act(page, "readText", "<img src=x onerror=alert(1)>")
    assert message(page).startswith("rank 0, position 0: '<img' is not an action")
    act(page, "readText", "0F99999999999999999999 0B0")
    assert "has 20 digits" in message(page)
    act(page, "insert", "1F" + "9" * 12)
    assert "never" not in message(page)
    act(page, "undo")
    assert rows(page) == before
    page.evaluate("location.hash = '#schedule=AAAA'")
    page.wait_for_function("document.querySelector('dp-studio').message.textContent.includes('link')")
    assert message(page) == "the link is damaged or was cut; copy the whole link again"
    act(page, "readText", "# <b onclick=alert(1)>bold</b>: 1 ranks, 1 stages, 1 microbatches\nrank 0: 0F0 0B0")
    assert page.locator("dp-studio b").count() == 0
    assert page.locator("dp-studio .title").inner_text() == "<b onclick=alert(1)>bold</b>"
    act(page, "undo")
    assert rows(page) == before


def test_a_link_that_unpacks_to_a_gigabyte_is_refused(page):
    open_studio(page, ("1f1b", 2, 2))
    page.evaluate(
        """async () => {
            const stream = new Blob([new Uint8Array(3e7)]).stream().pipeThrough(new CompressionStream("deflate-raw"));
            const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
            let letters = "";
            for (let i = 0; i < bytes.length; i += 8192) letters += String.fromCharCode(...bytes.subarray(i, i + 8192));
            location.hash = "#schedule=" + btoa(letters).replaceAll("+", "-").replaceAll("/", "_");
        }"""
    )
    page.wait_for_function("document.querySelector('dp-studio').message.textContent.includes('link')")


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_cells_are_explained_in_the_library_s_words(page, name):
    open_studio(page, (name, 4, 8))
    act(page, "cost", {"key": "transfer", "value": 1})
    explanation = pp.explain(schedules.build(name, 4, 8), Cost(transfer=1))
    told = [pause for pause in explanation.pauses if pause.phase != "cool-down"][:10]
    assert len(told) == 10
    for pause in told:
        spans = explanation.timeline.spans_by_rank[pause.rank]
        position = next(i for i, span in enumerate(spans) if span.start == pause.end)
        act(page, "point", {"rank": pause.rank, "position": position})
        press(page, "Enter")
        assert str(pause) in message(page)
        assert studio(page, "e.timeline.view.path.spans.length") > 1
    act(page, "point", {"rank": 0, "position": 0})
    press(page, "Enter")
    assert studio(page, "e.timeline.view.path.spans.length") == 1


def event_set(trace):
    return sorted(json.dumps({k: v for k, v in event.items() if k != "id"}, sort_keys=True) for event in trace)


def saved(page, name):
    with page.expect_download() as waiting:
        page.get_by_role("button", name=name).click()
    return Path(waiting.value.path()), waiting.value.suggested_filename


@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_every_export_is_read_back(page, name, tmp_path):
    open_studio(page, (name, 2, 4))
    act(page, "cost", {"key": "F", "value": 2})
    program, cost = schedules.build(name, 2, 4), Cost(F=2)
    page.locator("dp-studio summary", has_text="Text, link, files").click()
    assert Program.parse("again", studio(page, "e.exporting.area.value")).ranks == program.ranks
    path, file_name = saved(page, "Save trace for Perfetto")
    assert file_name.endswith(".trace.json")
    expected = json.loads(pp.simulate(program, cost).to_perfetto())["traceEvents"]
    assert event_set(json.loads(path.read_text())["traceEvents"]) == event_set(expected)
    path, file_name = saved(page, "Save file")
    kept = path.rename(tmp_path / file_name)
    act(page, "start", {"name": "gpipe", "ranks": 3, "microbatches": 2})
    page.locator("dp-studio input[type=file]").set_input_files(str(kept))
    page.wait_for_function("document.querySelector('dp-studio').session.costs.F === 2")
    assert rows(page) == program.rows()
    if name == "zbv":
        path, _ = saved(page, "Save CSV")
        assert path.read_text() == pp.to_torch_csv(program)
    assert studio(page, "e.timeline.toSvg()").startswith("<svg xmlns")
    assert page.evaluate("document.querySelector('dp-studio').timeline.toPng().then(blob => blob.size)") > 5000
    page.get_by_label("Form").select_option("python")
    script = tmp_path / "run.py"
    script.write_text(studio(page, "e.exporting.area.value"))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert f"{pp.simulate(program, cost).makespan} ticks\n" in ran.stdout
    losses = re.findall(r"(\d+): (\d\.\d+)", ran.stdout.splitlines()[-1])
    assert sorted(int(microbatch) for microbatch, _ in losses) == [0, 1, 2, 3]


def test_the_challenges_are_solved_with_all_stars_and_the_notebook_accepts_them(page):
    with_challenges(page)
    checks = {one.about.title: one for one in topic("studio")}
    for index, challenge in enumerate(CHALLENGES):
        for star in ("time", "memory"):
            act(page, "challenge", index)
            answer = ANSWERS[challenge.name][star]
            for rank, row in enumerate(answer):
                act(page, "point", {"rank": rank, "position": 0})
                act(page, "retype", row)
            found = judge(challenge, answer)
            assert studio(page, "e.figures.makespan") == found.timeline.makespan
            words = page.locator("dp-studio .judgement").inner_text()
            assert words.startswith("Solved, with the star") == (found.time or found.memory)
            assert getattr(found, star)
            text = page.evaluate("document.querySelector('dp-studio').actions.answer()")
            pasted = eval(f"[{text}]")  # what a learner pastes into the answer's list
            assert checks[challenge.title].verdict(pasted).passed
    stars = page.locator("dp-studio .challenges .stars").all_inner_texts()
    assert stars == ["★★★"] * 10
    page.reload()
    page.wait_for_function("document.querySelector('dp-studio')?.timeline?.tracks")
    assert page.locator("dp-studio .challenges .stars").all_inner_texts() == ["★★★"] * 10
    assert check.studio.mend.about.kind == "puzzle"


def test_no_challenge_starts_solved(page):
    with_challenges(page)
    for index in range(len(CHALLENGES)):
        act(page, "challenge", index)
        assert page.locator("dp-studio .judgement").inner_text().startswith("Not yet: ")


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
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with_challenges(page, theme)
    for summary in page.locator("dp-studio details.section:not([open]) > summary").all()[::-1]:
        summary.click()
    act(page, "challenge", 0)
    found = axe.Axe().run(page).response["violations"]
    assert [v for v in found if v["impact"] in ("serious", "critical")] == []
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_finger_moves_a_cell(browser, tmp_path):
    from drawing_page import document

    from dualpipe_lab.viz import Studio

    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True)
    page = context.new_page()
    (tmp_path / "page.html").write_text(document(Studio(("1f1b", 2, 2), ranks=(2,), microbatches=(2,)).to_html()))
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("document.querySelector('dp-studio')?.timeline?.tracks")
    (x, y), (to, _) = cell(page, 0, 0), cell(page, 0, 1)
    touch = context.new_cdp_session(page)
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for step in range(1, 5):
        at = {"x": x + (to + 8 - x) * step / 4, "y": y}
        touch.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [at]})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert rows(page)[0] == "0F1 0F0 0B0 0B1"
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


def test_a_stage_may_be_on_two_ranks_where_the_reader_says_so(page):
    program = schedules.build("dualpipe", 2, 4)
    open_studio(page, ("1f1b", 2, 4))
    for rank, row in enumerate(program.rows()):
        act(page, "point", {"rank": rank, "position": 0})
        act(page, "retype", row)
    assert not verdict(page).startswith("Valid")
    page.locator("dp-studio summary", has_text="Size, costs and memory").click()
    page.get_by_label("On how many ranks a stage may be").select_option("two ranks")
    assert verdict(page).startswith("Valid: 12 ticks")
    act(page, "undo")
    assert page.get_by_label("On how many ranks a stage may be").input_value() == "1"


def test_costs_of_each_stage_are_typed_and_a_limit_is_drawn(page):
    open_studio(page, ("1f1b", 2, 4))
    page.locator("dp-studio summary", has_text="Size, costs and memory").click()
    field = page.get_by_label("W of each stage")
    field.fill("1 3")
    field.press("Enter")
    assert studio(page, "e.figures.makespan") == pp.simulate(schedules.build("1f1b", 2, 4), Cost(W=[1, 3])).makespan
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


def test_costs_of_each_stage_follow_the_number_of_stages_and_refuse_another_order(page):
    open_studio(page, ("1f1b", 2, 2))
    act(page, "costs", {"key": "F", "text": "1 4"})
    act(page, "point", {"rank": 1, "position": 0})
    act(page, "retype", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1")
    assert not verdict(page).startswith("Valid: ")
    act(page, "size", {"numStages": 3})
    assert studio(page, "e.session.costs.F") == [1, 4, 4]
    assert verdict(page).startswith("Valid: ")
    act(page, "size", {"numStages": 5000})
    assert message(page) == "a schedule has 1 to 4096 stages and microbatches, got 5000"
    act(page, "undo")
    act(page, "undo")
    act(page, "unitCosts")
    act(page, "compare", "zbv")
    act(page, "costs", {"key": "F", "text": "1 4 4"})
    assert message(page).startswith("F lists 3 stages, the program has 2")
    act(page, "costs", {"key": "F", "text": "1 4"})
    assert message(page) == ("costs differ between the 2 stages, and another order has 4; give all stages one cost")
    assert studio(page, "e.session.costs.F") == 1
