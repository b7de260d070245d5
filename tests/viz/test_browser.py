"""The element in Chromium, without a network: what it draws, computes and tells, by pointer and by keyboard."""

import json
from fractions import Fraction

import pytest
from drawing_page import check_accessibility, document, element
from timeline_grid import ORACLES, numbers, same, timelines

from dualpipe_lab import Cost, Program, Timeline, schedules, simulate
from dualpipe_lab.timeline import Span
from dualpipe_lab.viz import compare
from dualpipe_lab.viz.embed import timeline_html, track_spec

pytestmark = pytest.mark.browser
DUALPIPE = Program.parse("DualPipe", ORACLES["dualpipe 8 ranks 20 microbatches"])


NUMBERS = """specs => specs.map((spec) => {
  const track = makeTrack(spec), entries = ({ times, counts }) => times.map((time, i) => [time, counts[i]]);
  const keys = ["src", "dst", "sent", "left", "arrived", "label"];
  const messages = track.messages.map((one) => keys.map((key) => one[key]));
  return { messages, makespan: track.makespan, busy: track.busy, peak: track.peak, starts: [...track.start],
    live: track.busy.map((_, rank) => entries(liveOf(track, rank))), path: criticalPath(track).spans };
})"""


def test_the_page_computes_what_python_computes(modules):
    """To the last digit: programs, which the page simulates, and records, which have no costs."""
    tests = list(timelines())[::3]
    tests += [Timeline.from_dict(json.loads(json.dumps({**one.to_dict(), "costs": None}))) for one in tests[::5]]
    there = modules("track", "path").evaluate(NUMBERS, [track_spec(timeline) for timeline in tests])
    for timeline, found in zip(tests, there, strict=True):
        expected = numbers(timeline)
        expected["starts"] = [span[1] for span in expected.pop("spans")]
        assert same(found) == expected, timeline.name


def test_a_narrow_drawing_starts_at_the_time_that_it_is_told_to_look_at(page):
    timeline = simulate(schedules.build("easy_dualpipe", 4, 12))
    for width, is_moved in ((390, True), (1280, False)):
        page.set_viewport_size({"width": width, "height": 800})
        page.show(compare(timeline, look=40).to_html())
        left, at, room = element(page, "[e.scroller.scrollLeft, 40 * e.screen.layout.perTime, e.screen.layout.room]")
        assert left <= at <= left + room
        assert bool(left) is is_moved
    lower = "lower case, dark bar: the rank's second stage"
    assert lower in page.locator("dp-timeline .legend").inner_text()
    page.show(compare(simulate(schedules.build("1f1b", 4, 12))).to_html())
    assert lower not in page.locator("dp-timeline .legend").inner_text()


def test_the_pixels_of_a_cell_have_its_colour(page):
    page.show(timeline_html(simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=3))))
    found = element(
        page,
        """(() => { const { width, height } = e.canvas, l = e.screen.layout, ratio = width / l.width;
        const pixels = e.canvas.getContext('2d').getImageData(0, 0, width, height).data;
        return [[0, 0.2], [1, 1.2]].map(([rank, time]) => {
          const y = Math.round((l.tracks[0].top + rank * 45 + 4) * ratio);
          const at = 4 * (y * width + Math.round((l.left + time * l.perTime) * ratio));
          return [...pixels.slice(at, at + 4)]; }); })()""",
    )
    assert found == [[0x00, 0x72, 0xB2, 255]] * 2


def test_the_status_is_empty_while_time_runs_and_nothing_moves(page):
    page.show(timeline_html(simulate(schedules.build("1f1b", num_ranks=8, num_microbatches=16))))
    element(page, "e.player.seek(e.makespan)")
    before = element(page, "[e.status.textContent.split(': ')[1], e.offsetHeight]")
    assert before[0] == "all done"
    assert element(page, "(e.player.toggle(), [e.status.textContent, e.offsetHeight])") == ["", before[1]]
    element(page, "(e.select(null), null)")
    assert element(page, "e.status.textContent") == ""
    element(page, "(e.player.toggle(), null)")
    assert " of " in element(page, "e.status.textContent")


def test_runs_of_one_program_share_a_title_and_long_idle_times_fit_their_column(page):
    run = Timeline("1F1B", [[Span(0, 0, 1_234_567, "F", 0, 0, "0F0")], []], source="measured", unit="ns")
    long = Timeline("1F1B", [[Span(0, 0, 113_988_000, "F", 0, 0, "0F0")], []], source="virtual", unit="ns")
    page.show(timeline_html(run, long))
    assert element(page, "e.frame.querySelector('.title').textContent") == "1F1B"
    texts = element(page, "[...e.toSvg().matchAll(/<text[^>]*>([^<]*)/g)].map((found) => found[1])")
    assert "114" in texts
    assert "113.988" not in texts


def test_a_slider_moved_by_the_keyboard_recomputes(page):
    program = schedules.build("1f1b", num_ranks=4, num_microbatches=8)
    page.show(timeline_html(simulate(program)))
    names = page.locator("dp-timeline .cost span").all_text_contents()
    assert names == ["F", "I", "W", "latency", "transfer"]
    page.get_by_label("transfer: ").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.get_by_label("W: ticks").press("ArrowRight")
    expected = simulate(program, Cost(W=2, transfer=2))
    assert element(page, "e.makespan") == element(page, "e.time") == expected.makespan
    assert f"{expected.makespan} ticks" in page.locator("dp-timeline .headline").inner_text()
    page.get_by_role("button", name="Reset costs").click()
    assert element(page, "e.makespan") == simulate(program).makespan


def test_a_notebook_s_shortcuts_leave_plain_keys_to_the_drawing(page):
    page.show(timeline_html(simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=3))))
    page.evaluate("document.addEventListener('keydown', event => { window.last = event.key; event.preventDefault(); })")
    page.get_by_label("F: ticks").press("ArrowRight")
    page.get_by_role("button", name="Critical path").press("Enter")
    assert (element(page, "e.costs.F"), element(page, "e.selection")) == (2, "0B2")
    page.get_by_label("F: ticks").press("Control+Enter")
    assert page.evaluate("last") == "Enter"


def test_a_click_on_a_cell_shows_its_critical_path(page):
    timeline = simulate(DUALPIPE)
    page.show(timeline_html(timeline))
    x, y = element(
        page,
        """(() => { const l = e.screen.layout, t = e.tracks[0], s = t.rankStart[3] - 1;
      return [l.left + (t.start[s] + t.end[s]) / 2 * l.perTime, l.tracks[0].top + 2 * 45 + 10]; })()""",
    )
    page.locator("dp-timeline canvas").click(position={"x": x, "y": y})
    assert element(page, "e.selection") == timeline.spans_by_rank[2][-1].label
    page.locator("dp-timeline canvas").hover(position={"x": x, "y": y})
    tip = page.locator("dp-timeline .tip").inner_text()
    assert tip.startswith(timeline.spans_by_rank[2][-1].label)
    assert "rank 2, from" in tip


def test_recorded_and_fractional_timelines_have_no_sliders(page):
    program = schedules.build("gpipe", num_ranks=2, num_microbatches=3)
    record = Timeline.from_dict({**simulate(program).to_dict(), "costs": None, "source": "measured"})
    for timeline in (record, simulate(program, Cost(F=Fraction(1, 2)))):
        page.show(timeline_html(timeline))
        assert page.locator("dp-timeline .costs").count() == 0
        assert element(page, "e.screen.cells") == sum(1 for _ in program)
        assert element(page, "e.makespan") == float(timeline.makespan)


def test_a_slider_shows_the_cost_of_the_timeline_that_has_it(page):
    one_f_one_b = schedules.build("1f1b", num_ranks=8, num_microbatches=20)
    page.show(compare(simulate(one_f_one_b), simulate(one_f_one_b), simulate(DUALPIPE)).to_html())
    slider = page.get_by_label("F&B: ticks")
    assert slider.get_attribute("aria-valuetext") == "3 ticks"
    slider.press("ArrowRight")
    expected = [simulate(program, Cost(overlap=4)).makespan for program in (one_f_one_b, one_f_one_b, DUALPIPE)]
    assert element(page, "e.tracks.map(t => t.makespan)") == expected


def test_many_outputs_share_the_first_definition(page):
    timeline = simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=2))
    page.show(timeline_html(timeline) * 3)
    assert page.locator("dp-timeline .play").count() == 3


def test_without_scripts_the_picture_stays(browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_content(document(timeline_html(simulate(DUALPIPE))))
    box = page.get_by_alt_text("Timeline of DualPipe").bounding_box()
    assert box["width"] > 600
    assert box["height"] > 150
    context.close()


def test_reduced_motion_steps_instead_of_moving(page):
    page.emulate_media(reduced_motion="reduce")
    page.show(timeline_html(simulate(schedules.build("gpipe", num_ranks=2, num_microbatches=2)), time=0))
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelector('dp-timeline').time > 0")
    assert element(page, "e.time") == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page, theme):
    timeline = simulate(DUALPIPE)
    page.show(timeline_html(timeline) + compare(timeline, timeline).to_html(), theme)
    page.locator("dp-timeline summary").first.click()
    assert element(page, "e.theme.dark") is (theme == "dark")
    check_accessibility(page)


def test_saved_files_are_whole(page):
    page.show(timeline_html(simulate(DUALPIPE)))
    with page.expect_download() as saved:
        page.get_by_role("button", name="SVG: save").click()
    assert saved.value.suggested_filename == "dualpipe.svg"
    with page.expect_download() as saved:
        page.get_by_role("button", name="PNG: save").click()
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")


def test_sixty_four_ranks_stay_usable(page):
    timeline = simulate(schedules.build("1f1b", num_ranks=64, num_microbatches=512))
    page.show(timeline_html(timeline))
    assert element(page, "e.makespan") == timeline.makespan
    assert element(page, "e.screen.cells") == 0  # shares of stretches of time, not cells
    for _ in range(9):
        page.get_by_role("button", name="Zoom in").click()
    assert element(page, "e.screen.cells") > 1000  # cells again, where there is room for them
