import json
import random
import xml.etree.ElementTree as ET
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules import gpipe, one_f_one_b
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Message, Span, Timeline

ORACLES = json.loads((Path(__file__).parent / "oracles" / "programs.json").read_text())
DUALPIPE = Program.parse("DualPipe", ORACLES["dualpipe 8 ranks 20 microbatches"])
ZBV = Program.parse("ZBV", ORACLES["zbv 4 ranks 8 microbatches (torch)"])
SVG = "{http://www.w3.org/2000/svg}"
PROGRAMS = [gpipe(4, 8), one_f_one_b(4, 8), one_f_one_b(1, 1), DUALPIPE, ZBV, one_f_one_b(8, 200)]
COSTS = [Cost(), Cost(F=2, I=3, W=1, overlap=5, latency=1, transfer=2), Cost(F=Fraction(1, 3), transfer=Fraction(5, 2))]


def all_reduce():
    spans = [
        [Span(0, 0, 3_000_000, "compute"), Span(0, 3_000_000, 5_000_000, "collective", label="all_reduce")],
        [
            Span(1, 0, 1_000_000, "compute"),
            Span(1, 1_000_000, 3_000_000, "wait"),
            Span(1, 3_000_000, 5_000_000, "collective", label="all_reduce"),
        ],
    ]
    message = Message(0, 1, 3_000_000, 3_500_000, "all_reduce", num_bytes=64)
    return Timeline("all_reduce", spans, [message], source="virtual", unit="ns")


def test_numbers_of_a_timeline():
    timeline = all_reduce()
    assert timeline.num_ranks == 2
    assert timeline.makespan == 5_000_000
    assert [timeline.busy_time(rank) for rank in (0, 1)] == [5_000_000, 3_000_000]
    assert [timeline.bubble_time(rank) for rank in (0, 1)] == [0, 2_000_000]
    assert timeline.bubble_fraction == 0.2
    assert timeline.window(1) == (0, 5_000_000)
    assert timeline.live_activations(0) == [(0, 0)]
    assert timeline.peak_activations(0) == 0


def test_nested_spans_count_once():
    timeline = Timeline("nested", [[Span(0, 0, 9, "step"), Span(0, 2, 5, "compute"), Span(0, 8, 12, "compute")]])
    assert timeline.busy_time(0) == 12


def test_an_empty_timeline_has_no_time():
    timeline = Timeline("empty", [[], []])
    assert (timeline.makespan, timeline.bubble_fraction, timeline.critical_path()) == (0, 0.0, [])
    assert timeline.window(0) == (0, 0)
    assert "no time passes" in str(timeline)
    ET.fromstring(timeline.to_svg())


def test_live_activations_are_held_until_the_end_of_b_or_w():
    split = simulate(Program.parse("split", ["0F0 0I0 0F1 0B1 0W0"]))
    assert split.live_activations(0) == [(0, 1), (2, 2), (5, 1), (6, 0)]
    whole = simulate(one_f_one_b(2, 2))
    assert whole.live_activations(0) == [(0, 1), (1, 2), (6, 1), (9, 0)]
    assert whole.live_activations(1) == [(0, 0), (1, 1), (7, 0)]


def test_an_activation_is_freed_before_the_next_one_is_made():
    timeline = simulate(one_f_one_b(1, 3), Cost(F=0, B=0))
    assert timeline.peak_activations(0) == 1  # although everything happens at time 0
    assert timeline.live_activations(0) == [(0, 0)]


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False))
def test_the_critical_path_leads_without_a_gap_from_0_to_the_makespan(rng):
    program = rng.choice([gpipe(3, 4), one_f_one_b(4, 5), DUALPIPE, ZBV])
    numbers = [rng.randint(1, 9) for _ in range(5)]
    cost = Cost(*numbers[:3], latency=rng.choice([0, numbers[3]]), transfer=rng.choice([0, numbers[4]]))
    timeline = simulate(program, cost)
    route = timeline.critical_path()
    assert route[0].start == 0
    assert route[-1].end == timeline.makespan
    for before, after in pairwise(route):
        if before.rank == after.rank:
            assert before.end == after.start
        else:
            links = [m for m in timeline.messages if (m.src, m.dst) == (before.rank, after.rank)]
            arriving = next(m for m in links if m.arrived == after.start)
            first = next(m for m in links if m.sent == before.end)
            queued = [m for m in links if first.arrived < m.arrived <= arriving.arrived]
            assert all(m.left is not None for m in queued)  # the link was busy all the time
            assert after.start - before.end == cost.transfer * (1 + len(queued)) + cost.latency


def test_shortening_what_is_critical_shortens_the_run():
    slow_stage = simulate(gpipe(3, 6), Cost(F=[1, 4, 1]))
    route = slow_stage.critical_path()
    assert {span.microbatch for span in route if span.stage == 1 and span.kind == "F"} == set(range(6))


def test_the_critical_path_without_labels_follows_time():
    spans = [[Span(0, 0, 4, "compute")], [Span(1, 0, 1, "compute"), Span(1, 1, 6, "wait"), Span(1, 6, 7, "compute")]]
    timeline = Timeline("measured", spans, [Message(0, 1, 4, 6)], source="measured", unit="ns")
    assert timeline.critical_path() == [spans[0][0], spans[1][2]]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_dictionary_is_json_and_exact(program, cost):
    timeline = simulate(program, cost)
    copy = Timeline.from_dict(json.loads(json.dumps(timeline.to_dict())))
    assert copy == timeline
    assert copy.messages == timeline.messages
    assert (copy.name, copy.source, copy.unit) == (timeline.name, timeline.source, timeline.unit)
    assert Timeline.from_dict(all_reduce().to_dict()).messages[0].num_bytes == 64


def test_other_dictionaries_are_refused():
    with pytest.raises(ValueError, match="use Timeline"):
        Timeline.from_dict({"ranks": []})


def test_equality_looks_at_what_happened_only():
    one = simulate(gpipe(2, 3))
    same = Timeline("another run", one.spans_by_rank, reversed(one.messages), source="virtual")
    assert one == same
    assert one != simulate(gpipe(2, 3), Cost(latency=1))
    assert one != simulate(gpipe(2, 3), unit="ns")
    assert one != Timeline(one.name, one.spans_by_rank, one.messages[1:])
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_perfetto_has_spans_arrows_and_counters():
    timeline = simulate(DUALPIPE, COSTS[1])
    events = json.loads(timeline.to_perfetto())["traceEvents"]
    phases = [event["ph"] for event in events]
    num_spans = sum(map(len, timeline.spans_by_rank))
    assert phases.count("X") == num_spans
    assert phases.count("s") == phases.count("f") == len(timeline.messages)
    assert max(event["args"]["activations"] for event in events if event["ph"] == "C") == 9
    slices = [event for event in events if event["ph"] == "X"]
    for event in events:
        if event["ph"] in "sf":  # an arrow needs a slice to hang on
            assert any(s["pid"] == event["pid"] and s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in slices)


def test_perfetto_writes_nanoseconds_as_microseconds():
    events = json.loads(all_reduce().to_perfetto())["traceEvents"]
    assert [event["dur"] for event in events if event["ph"] == "X"] == [3000, 2000, 1000, 2000, 2000]
    assert not [event for event in events if event["ph"] == "C"]


def test_text_of_1f1b():
    assert str(simulate(one_f_one_b(2, 3))).splitlines() == [
        "1F1B: 2 ranks, simulated",
        "time    0              5              10  12 ticks",
        "rank 0  F0 F1 ......B0    F2 B1    ...B2",
        "rank 1  ...F0 B0    F1 B1    F2 B2    ......",
        "makespan 12 ticks, bubble 25.0% (6 of 24 idle), peak activations 2",
        "F forward, B backward, . idle",
    ]


def test_text_shows_letters_where_microbatches_do_not_fit():
    lines = str(simulate(DUALPIPE)).splitlines()
    assert lines[2] == "rank 0  FFFFFFFfiwfiwfiwf&  ...&  &  &  &  &  b .&  b .&  b .&  b IWIWIWIW"
    assert "& an overlapped pair" in lines[-1]
    assert "lower case: the rank's second stage" in lines[-1]
    wide = simulate(DUALPIPE).to_text(width=300).splitlines()
    assert "F7&b13" in wide[2]


def test_text_of_a_virtual_run():
    lines = str(all_reduce()).splitlines()
    assert lines[0] == "all_reduce: 2 ranks, virtual"
    assert lines[3] == "rank 1  cc~~~~****"
    assert lines[4] == "makespan 5 ms, bubble 20.0% (2 of 10 idle)"
    assert lines[5] == "* collective, c compute, ~ wait, . idle"


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(
    "program", [*PROGRAMS, gpipe(64, 24)], ids=lambda program: f"{program.name}{program.num_ranks}"
)
def test_rows_never_exceed_the_width(program, cost, width):
    lines = simulate(program, cost).to_text(width).splitlines()
    assert all(len(line) <= width for line in lines if line.startswith("rank "))
    assert sum(line.startswith("rank ") for line in lines) == program.num_ranks
    assert len(lines) == program.num_ranks + 4


def test_text_of_a_long_run_is_an_overview():
    lines = simulate(gpipe(4, 400)).to_text(80).splitlines()
    body = lines[2][8:]
    assert set(body) <= set("FB+.#")
    assert body.count("B") > 1.8 * body.count("F") > 0
    assert "one column = " in lines[-1]


def test_measured_times_of_any_size_are_drawn():
    rng = random.Random(0)
    spans, now = [], 0
    for m in range(30):
        end = now + rng.randint(900_000, 1_100_000)
        spans.append(Span(0, now, end, "F", 0, m, f"0F{m}"))
        now = end + rng.randint(0, 1000)
    timeline = Timeline("measured", [spans], source="measured", unit="ns")
    assert "F" in timeline.to_text(80).splitlines()[2]
    ET.fromstring(timeline.to_svg())


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(
    "program", [*PROGRAMS, gpipe(64, 24)], ids=lambda program: f"{program.name}{program.num_ranks}"
)
def test_svg_is_accessible_and_self_contained(program, cost):
    timeline = simulate(program, cost)
    text = timeline.to_svg()
    root = ET.fromstring(text)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == f"Timeline of {program.name}: {program.num_ranks} ranks"
    assert f"bubble {timeline.bubble_fraction:.1%}" in root.find(f"{SVG}desc").text
    assert not [node for node in root.iter() if node.get("id")]  # two pictures on one page must not clash
    assert "script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert float(root.get("width")) <= 1280


def test_svg_has_one_path_per_kind_and_a_letter_per_cell():
    root = ET.fromstring(simulate(gpipe(4, 8)).to_svg())
    fills = [path.get("fill") for path in root.iter(f"{SVG}path")]
    assert fills.count("#0072b2") == fills.count("#e69f00") == 2  # the cells, and the legend
    letters = [node.text for node in root.iter(f"{SVG}text")]
    assert all(letters.count(f"{kind}{m}") == 4 for kind in "FB" for m in range(8))


def test_svg_of_pairs_shows_both_microbatches():
    letters = [node.text for node in ET.fromstring(simulate(DUALPIPE).to_svg()).iter(f"{SVG}text")]
    assert {"F7", "b13"} <= set(letters)  # (0F7;7B13)OVERLAP_F_B
    cells = sum(1 for _ in DUALPIPE)
    assert len([letter for letter in letters if letter and letter[0] in "FBIWfbiw" and letter[1:].isdigit()]) == cells


def test_svg_of_a_long_run_stays_small():
    for program in (gpipe(64, 512), one_f_one_b(64, 512)):
        assert len(simulate(program).to_svg()) < 60_000


def test_html_is_the_picture_in_a_box_that_the_keyboard_can_scroll():
    text = simulate(gpipe(2, 2))._repr_html_()
    assert text.startswith('<div style="overflow-x:auto" tabindex="0" role="region"')
    assert "<svg" in text
    hostile = Timeline('<b>"x"', [[Span(0, 0, 1, "F", 0, 0, "0F0")]])._repr_html_()
    assert "<b>" not in hostile


def test_names_with_angle_brackets_keep_the_svg_well_formed():
    ET.fromstring(Timeline("a < b & c", [[Span(0, 0, 1, "other", label="<x>")]]).to_svg())
