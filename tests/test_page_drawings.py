"""The drawings on the built pages: every action has its cell, keys move them, sliders give the simulator's numbers."""

import json
import re

import pytest
from built_pages import DESK, PHONE, Visit, drawn_pages

from dualpipe_lab import Cost, Program, simulate

pytestmark = pytest.mark.browser

# One drawing of everything from start to end: its number of cells, and the width of the shortest.
DRAW_WHOLE = """e => {
  [e.selection, e.zoom, e.time] = ["", 0, e.makespan];
  e.draw();
  const pixels = Math.min(...e.tracks.map(track => track.shortest)) * e.screen.layout.perTime;
  return { cells: e.screen.cells, pixels };
}"""
STATE = "e => ({ time: e.time, makespan: e.makespan, playing: e.playing, status: e.status.textContent })"


@pytest.fixture(scope="module", params=drawn_pages())
def opened(browser, site, request):
    """One page with drawings, loaded once for all tests that use them."""
    visit = Visit(browser, site).open(request.param)
    visit.path = request.param
    yield visit
    visit.context.close()


def drawings(visit, tag="dp-timeline"):
    """The page's drawings, each with the data that it was given."""
    found = visit.page.locator(tag).element_handles()
    return [(element, json.loads(element.evaluate("e => e.dataset.spec ?? 'null'"))) for element in found]


def test_the_known_pages_have_drawings():
    assert {"book/intro", "book/start/time", "book/pp/gpipe", "book/pp/explorer"} <= set(drawn_pages())


# ---- as many cells as actions


def program_of(track):
    """The program that a page was given; there, an action on the stage of the action before it leaves the stage out."""
    rows = []
    for row in track["rows"]:
        stage, tokens = "", []
        for token in row.split():
            parts = []
            for own, rest in re.findall(r"(\d*)([FBIW]\d+)", token):
                stage = own or stage
                parts.append(stage + rest)
            tokens.append(f"({';'.join(parts)})OVERLAP_F_B" if len(parts) > 1 else parts[0])
        rows.append(" ".join(tokens))
    return Program.parse(track["name"], rows)


def simulated(track, costs):
    """The library's timeline of a page's program; a list of the pairs' costs is in the order of their ranks."""
    program = program_of(track)
    if isinstance(costs["overlap"], list):
        pairs = [step for row in program.ranks for step in row if len(step) == 2]
        costs = {**costs, "overlap": dict(zip(pairs, costs["overlap"], strict=True)).__getitem__}
    return simulate(program, Cost(**costs))


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_every_action_of_a_program_has_its_cell(opened, viewport):
    """Where one is too narrow there is an overview instead."""
    opened.look(viewport, "light")
    for number, (element, spec) in enumerate(drawings(opened)):
        if spec is None or not all("rows" in track for track in spec["tracks"]) or element.evaluate("e => e.streams"):
            continue
        drawn = element.evaluate(DRAW_WHOLE)
        rows = [row for track in spec["tracks"] for row in simulated(track, track["costs"]).spans_by_rank]
        spans = [span for row in rows for span in row if span.kind != "wait" and span.duration > 0]
        num_actions = sum(len(span.actions) or 1 for span in spans)
        assert drawn["cells"] == (num_actions if drawn["pixels"] >= 1.5 else 0), f"timeline {number} of {opened.path}"
    assert opened.complaints == []


# ---- keys
def test_keys_step_play_and_jump(opened):
    opened.look(DESK, "light")
    for element, _ in drawings(opened):
        if element.evaluate("e => e.getRootNode().host?.localName === 'dp-studio'"):
            continue  # there the keys move the choice of actions: tests/viz/test_studio.py
        element.evaluate("e => e.scroller.focus()")
        seen = []
        for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End"):
            opened.page.keyboard.press(key)
            seen.append(element.evaluate(STATE))
        first, second, third, back, last = (state["time"] for state in seen)
        assert first == 0 < second == back < third <= last == seen[-1]["makespan"]
        assert len({state["status"] for state in seen[:3]}) == 3
        opened.page.keyboard.press("Home")
        opened.page.keyboard.press("Space")
        opened.page.wait_for_function("e => e.playing && e.time > 0", arg=element)
        opened.page.keyboard.press("Space")
        assert element.evaluate(STATE)["playing"] is False
    assert opened.complaints == []


def test_keys_step_through_messages(opened):
    opened.page.emulate_media(reduced_motion="reduce")
    for element, spec in drawings(opened, "dp-steps"):
        element.evaluate("e => e.scroller.focus()")
        for key, time in (("Home", 0), ("ArrowRight", 1), ("End", len(spec["steps"]))):
            opened.page.keyboard.press(key)
            assert element.evaluate("e => e.time") == time
    opened.page.emulate_media(reduced_motion="no-preference")
    assert opened.complaints == []


# ---- sliders
def test_sliders_moved_by_the_keyboard_give_the_simulator_s_numbers(opened):
    opened.look(DESK, "light")
    for element, spec in drawings(opened):
        sliders = element.evaluate_handle("e => [...e.shadowRoot.querySelectorAll('.costs input')]")
        values = sliders.evaluate("all => all.map(slider => slider.getAttribute('aria-valuetext'))")
        assert [value for value in values if not re.match(r"\d", value)] == []
        count = len(values)
        can_move = [bool(spec) and "rows" in track for track in (spec or {"tracks": []})["tracks"]]
        assert (count > 0) == any(can_move)
        for i in range(count):
            sliders.evaluate("(all, i) => all[i].focus()", i)
            opened.page.keyboard.press("ArrowRight" if i != 1 else "ArrowLeft")
        for i in [i for i, movable in enumerate(can_move) if movable and count]:
            costs, makespan = element.evaluate("(e, i) => [e.tracks[i].costs, e.tracks[i].makespan]", i)
            assert costs != spec["tracks"][i]["costs"]
            assert makespan == simulated(spec["tracks"][i], costs).makespan
    assert opened.complaints == []
