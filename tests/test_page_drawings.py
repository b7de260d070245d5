"""The drawings on the built pages: every action has its cell, keys move them, sliders give the simulator's numbers."""

import json
import re

import pytest
from built_pages import DESK, PHONE, Visit, drawn_pages

from dualpipe_lab import Cost, Program, Timeline, simulate
from dualpipe_lab.pp.ranking import score
from dualpipe_lab.pp.schedules.variants import variant

pytestmark = pytest.mark.browser

# Every rectangle that any canvas of the page is asked to fill, by colour.
COUNT = """window.filled = [];
const fillRect = CanvasRenderingContext2D.prototype.fillRect;
CanvasRenderingContext2D.prototype.fillRect = function (x, y, width, height) {
  filled.push([this.fillStyle, width, height]);
  return fillRect.call(this, x, y, width, height);
};"""
# theme.mjs: kinds, then numbers; waits are frames without a fill
CELLS = ("#0072b2", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#595959")
# One drawing of everything from start to end, and what was filled for it.
DRAW_WHOLE = """e => {
  [e.selection, e.zoom, e.time] = ["", 0, e.makespan];
  filled.length = 0;
  e.draw();
  const { perTime, row } = e.screen.layout, sum = (total, track) => total + track.numRanks * track.makespan;
  const pixels = Math.min(...e.tracks.map(track => track.shortest)) * perTime;
  const rows = e.tracks.reduce(sum, 0) * perTime * row.cell;
  return { filled, cells: e.screen.cells, pixels, perTime, height: row.cell, line: row.line, rows };
}"""
STATE = "e => ({ time: e.time, makespan: e.makespan, playing: e.playing, status: e.status.textContent })"


@pytest.fixture(scope="module", params=drawn_pages())
def opened(browser, site, request):
    """One page with drawings, loaded once for all tests that use them."""
    visit = Visit(browser, site, COUNT).open(request.param)
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


def spans_of(track, streams):
    """How long each span of a track is and of how many actions it consists: in rows, and with `streams` in lanes."""
    if "rows" in track:
        timeline = simulated(track, track["costs"])
    else:
        timeline = Timeline.from_dict({"format": "dualpipe-lab/timeline/1", **track})
    spans = [span for row in timeline.spans_by_rank for span in row if span.kind != "wait"]
    sent = [message.arrived - (message.left or message.sent) for message in timeline.messages if streams]
    rows = [(span.duration, len(span.actions) or 1) for span in spans if span.stream == "work"]
    return rows, [(span.duration, 1) for span in spans if span.stream != "work" and streams] + [(t, 1) for t in sent]


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_every_action_has_its_cell(opened, viewport):
    opened.look(viewport, "light")
    for number, (element, spec) in enumerate(drawings(opened)):
        if spec is None:
            continue  # the explorer's own, below
        drawn = element.evaluate(DRAW_WHOLE)
        cells = [(width, height) for colour, width, height in drawn["filled"] if colour in CELLS]
        streams = element.evaluate("e => e.streams")
        found = [spans_of(track, streams) for track in spec["tracks"]]
        rows, lanes = ([span for track in found for span in track[place]] for place in (0, 1))
        if drawn["pixels"] >= 1.5:
            actions = sum(parts for duration, parts in rows + lanes if duration > 0)  # no time, no cell
            assert len(cells) == drawn["cells"] == actions, f"timeline {number} of {opened.path}"
        else:  # too narrow for cells: what is filled is as much of a row as work is of its time, in quarters
            assert drawn["cells"] == 0
            high = sum(t for t, _ in rows) * drawn["height"] + sum(t for t, _ in lanes) * drawn["line"]
            work = float(high) * drawn["perTime"]
            assert sum(width * height for width, height in cells) == pytest.approx(work, abs=drawn["rows"] / 8)
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


# ---- the explorer


NARROWEST = """e => { const { ranked } = e.results, longest = Math.max(...ranked.map(r => r.track.makespan));
  return ranked.map(r => [r.key, r.track.shortest * parseFloat(e.cards.get(r.key).canvas.style.width) / longest]); }"""


def test_the_explorer_ranks_by_keyboard_as_the_library_does(opened):
    opened.look(DESK, "light")
    for element, spec in drawings(opened, "dp-explorer"):
        for label, key in (("ranks: ", "ArrowLeft"), ("microb.: ", "ArrowLeft"), ("F: ", "ArrowRight")):
            opened.page.locator("dp-explorer").get_by_label(label).first.press(key)
        opened.settle()
        choice, found = element.evaluate("e => [e.choice, e.results.ranked.map(r => [r.key, r.makespan])]")
        for name, first in zip(("ranks", "microbatches"), spec["start"], strict=True):
            assert choice[name] == spec[name][max(spec[name].index(first) - 1, 0)]
        assert choice["costs"]["F"] == 2
        programs = {name: variant(name).build(choice["ranks"], choice["microbatches"]) for name, _ in found}
        scores = {name: score(program, Cost(**choice["costs"])) for name, program in programs.items()}
        assert found == [[name, pytest.approx(float(scores[name].makespan))] for name, _ in found]
        cards = dict(element.evaluate("e => [...e.cards].map(([key, card]) => [key, card.cells])"))
        narrowest = dict(element.evaluate(NARROWEST))
        # below one and a half pixels there is the overview of the shares of work, which has no cells
        expected = {name: len(list(p)) if narrowest[name] >= 1.5 else 0 for name, p in programs.items()}
        assert {name: cards[name] for name in programs} == expected
        assert sum(map(bool, expected.values())) > len(expected) / 2
    assert opened.complaints == []
