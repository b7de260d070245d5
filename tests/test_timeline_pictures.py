import random
import xml.etree.ElementTree as ET
from itertools import product

from timeline_samples import COSTS, DUALPIPE, PROGRAMS, SVG

from dualpipe_lab.pp.schedules import gpipe, one_f_one_b
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Span, Timeline


def test_text_shows_letters_where_microbatches_do_not_fit():
    lines = str(simulate(DUALPIPE)).splitlines()
    assert lines[2] == "rank 0  FFFFFFFfiwfiwfiwf&  ...&  &  &  &  &  b .&  b .&  b .&  b IWIWIWIW"
    assert "& an overlapped pair" in lines[-1]
    assert "lower case: the rank's second stage" in lines[-1]
    wide = simulate(DUALPIPE).to_text(width=300).splitlines()
    assert "F7&b13" in wide[2]


def test_text_of_a_virtual_run():
    both = [Span(rank, 3_000_000, 5_000_000, "collective") for rank in (0, 1)]
    late = [Span(1, 0, 1_000_000, "compute"), Span(1, 1_000_000, 3_000_000, "wait"), both[1]]
    timeline = Timeline("all_reduce", [[Span(0, 0, 3_000_000, "compute"), both[0]], late], source="virtual", unit="ns")
    lines = str(timeline).splitlines()
    assert lines[0] == "all_reduce: 2 ranks, virtual"
    assert lines[3] == "rank 1  cc~~~~****"
    assert lines[4] == "makespan 5 ms, bubble 20.0% (2 of 10 idle)"
    assert lines[5] == "* collective, c compute, ~ wait, . idle"


def test_rows_never_exceed_the_width(subtests):
    for program, cost, width in product([*PROGRAMS, gpipe(64, 24)], COSTS, [60, 80, 100]):
        with subtests.test(program=f"{program.name}{program.num_ranks}", cost=cost, width=width):
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


def test_svg_is_accessible_and_self_contained(subtests):
    for program, cost in product([*PROGRAMS, gpipe(64, 24)], COSTS):
        with subtests.test(program=f"{program.name}{program.num_ranks}", cost=cost):
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


def test_names_with_angle_brackets_keep_the_svg_well_formed():
    ET.fromstring(Timeline("a < b & c", [[Span(0, 0, 1, "other", label="<x>")]]).to_svg())
