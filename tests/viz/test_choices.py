"""What a reader chooses in the element: colours, memory bands, streams; by keyboard, by controls, by option."""

import pytest
from drawing_page import check_accessibility, element

from dualpipe_lab import Cost, schedules, simulate
from dualpipe_lab.ep import overlap
from dualpipe_lab.viz import compare
from dualpipe_lab.viz.embed import timeline_html

pytestmark = pytest.mark.browser
FILLS = '[...e.toSvg().matchAll(/<rect[^>]* fill="(#[0-9a-f]{6})"/g)].map(found => found[1])'


def piped():
    return simulate(schedules.build("dualpipe", num_ranks=4, num_microbatches=8), Cost(latency=2))


def pair():
    return overlap.simulate(overlap.one_f_one_b_overlap(2), overlap.ticks_of(1, 1)).timeline("pair")


def test_keys_change_colours_bands_and_streams_and_say_so(page):
    page.show(timeline_html(piped()))
    page.locator("dp-timeline .scroll").focus()
    heights = [element(page, "e.screen.layout.height")]
    said = []
    for key in ("c", "c", "C", "c", "m", "m", "s"):
        page.keyboard.press(key)
        said.append(element(page, "e.status.textContent"))
        heights.append(element(page, "e.screen.layout.height"))
    assert said == [
        *(f"Colours show the {word}." for word in ("direction", "stage", "microbatch", "kind of work")),
        *("Memory: chosen rank.", "Memory: every rank.", "Streams are shown."),
    ]
    assert heights[0] == heights[4] < heights[5] < heights[6] < heights[7]
    assert element(page, "[e.colourBy, e.memory, e.streams]") == ["kind", "all", True]
    page.keyboard.press("Control+c")  # the browser's
    assert element(page, "e.colourBy") == "kind"
    assert "C changes what colours show" in page.locator("dp-timeline .keys").text_content()


def test_controls_do_the_same_and_the_legend_follows(page):
    page.show(timeline_html(piped(), colour_by="stage"))
    legend = page.locator("dp-timeline .legend li")
    assert legend.all_inner_texts()[:4] == [f"{stage}\nstage {stage}" for stage in range(4)]
    page.get_by_label("Colour by").select_option("direction")
    assert "direction 1, bar on top" in legend.all_inner_texts()[1]
    assert set(element(page, FILLS)) >= {"#0072b2", "#e69f00"}
    page.get_by_label("Memory").select_option("rank")
    page.get_by_role("button", name="Streams").click()
    page.locator("dp-timeline .scroll").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert "rank 0 0F1 with communication 0F0 to rank 1" in element(page, "e.status.textContent")
    assert element(page, "e.status.textContent").endswith("; rank 0 holds 2 of at most 5 live activations")
    page.keyboard.press("ArrowDown")
    assert element(page, "e.status.textContent").endswith("rank 0 holds 2 of at most 5 live activations")
    page.keyboard.press("ArrowDown")
    assert "rank 1 holds" in element(page, "e.status.textContent")


def test_recomputed_costs_move_the_bars_of_the_messages(page):
    page.show(timeline_html(piped(), streams=True))
    ends = "e.tracks[0].messages.map((m) => [m.left, m.arrived])"
    before, cells = element(page, ends), element(page, "e.screen.cells")
    page.get_by_label("latency: ").press("ArrowRight")
    assert element(page, ends) != before
    assert all(arrived - left == 3 for left, arrived in element(page, ends))
    assert element(page, "e.screen.cells") == cells  # one per action and message, as before


def test_streams_play_together_and_a_bar_can_be_chosen(page):
    page.show(timeline_html(pair(), time=0))
    assert element(page, "[e.screen.cells, e.streams]") == [12 + 8, True]
    page.locator("dp-timeline .scroll").focus()
    page.keyboard.press("ArrowRight")
    assert element(page, "e.status.textContent").startswith("t = 1 of 12 ticks: rank 0 M_B1 with communication D_F0")
    x, y = element(
        page,
        """(() => { const l = e.screen.layout, place = l.tracks[0];
      return [l.left + 1.5 * l.perTime, place.top + place.lanes[0].y + 5]; })()""",
    )
    page.locator("dp-timeline canvas").click(position={"x": x, "y": y})
    assert element(page, "e.status.textContent") == "Critical path of D_F0: 2 cells, 0 messages, 2 of 2 ticks is work"
    page.keyboard.press("Escape")
    page.locator("dp-timeline canvas").hover(position={"x": x, "y": y})
    assert page.locator("dp-timeline .tip").inner_text().startswith("D_F0\ncollective\nrank 0, from 1 to 2 (1 ticks)")


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_serious_with_everything_shown(page, theme, width):
    page.set_viewport_size({"width": width, "height": 800})
    both = compare(pair(), pair(), colour_by="microbatch").to_html(script=False)
    shown = timeline_html(piped(), colour_by="direction", memory="all", streams=True, activation_bytes=2**30)
    page.show(shown + both, theme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    check_accessibility(page)
