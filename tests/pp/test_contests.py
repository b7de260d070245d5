"""The table of contests and the staircase: what two directions, the split backward and the overlap bring."""

import importlib.util
from fractions import Fraction
from pathlib import Path

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.schedules.variants import variant

PLACE = Path(__file__).parents[2] / "benchmarks" / "contests.py"
SPEC = importlib.util.spec_from_file_location("contests", PLACE)
contests = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(contests)

FREE, SHORT = Fraction(0), Fraction(1, 40)
NUMBERS = [  # schedule, pairs, latency, {microbatches: makespan}, the most activations with 24, copies of the weights
    ("1f1b", False, FREE, {20: 81, 24: 93, 64: 213}, 8, 1),
    ("1f1b", True, FREE, {20: "71.5", 24: "81.5", 64: "181.5"}, 16, 1),
    ("interleaved:num_virtual_stages=2", True, FREE, {20: "63.25", 24: "72.75", 64: "172.75"}, 12, 1),
    ("interleaved:num_virtual_stages=4", False, FREE, {20: "65.25", 24: "77.25"}, "9.75", 1),
    ("interleaved:num_virtual_stages=4", True, FREE, {20: "59.125", 24: "68.375", 64: "168.375"}, 10, 1),
    ("interleaved:num_virtual_stages=4", True, SHORT, {24: "71.675"}, 10, 1),
    ("zero_bubble_h1:num_virtual_stages=4", True, FREE, {20: "57.5", 24: "66.75", 64: "166.75"}, 10, 1),
    ("zero_bubble_h1:num_virtual_stages=4", True, SHORT, {24: 69, 64: 173}, 10, 1),
    ("zbv", True, FREE, {20: "63.5", 24: "75.5"}, 8, 1),
    ("dualpipe", False, FREE, {20: 66, 24: 78, 64: 198}, 9, 2),
    ("dualpipe", True, FREE, {20: 59, 24: 69, 64: 169}, 9, 2),
    ("dualpipe", True, SHORT, {20: "59.65", 24: "69.75", 64: "170.625"}, 9, 2),
    ("dualpipev", True, FREE, {20: "59.5", 24: "69.5", 64: "169.5"}, "8.5", 1),
    ("dualpipev", True, SHORT, {20: "60.65", 24: "70.85", 64: "172.6"}, "8.5", 1),
]


def test_the_table(subtests):
    for name, pairs, latency, makespans, peak, weights in NUMBERS:
        with subtests.test(name=name, pairs=pairs, latency=latency, makespans=makespans, peak=peak, weights=weights):
            for m, makespan in makespans.items():
                found = contests.contest(name, m, pairs, latency)
                assert (found.makespan, found.weights) == (Fraction(makespan), weights)
                assert m != 24 or found.peak == Fraction(peak)


def test_the_staircase():
    found = {words: (float(one.makespan), float(one.peak), one.weights) for words, one in contests.staircase()}
    assert found == {
        "1F1B": (81, 8, 1),
        "two directions alone": (86, 8, 2),
        "split backward alone": (67, 8, 1),
        "two directions and split backward": (66, 9, 2),
        "split backward on a V": (63.5, 8, 1),
        "pairs, four stages on a rank": (59.125, 11.5, 1),
        "pairs, two directions, split backward": (59, 9, 2),
        "pairs, split backward, four stages on a rank": (57.5, 11.5, 1),
    }


def test_one_rule_for_all():
    names = {variant(name).name for name in contests.CONTESTANTS}
    assert names == set(schedules.names(synchronous=True, pairs=False)) - {"looped_bfs"}  # as interleaved, holding all
    for name in contests.CONTESTANTS:
        without = contests.contest(name, 24, pairs=False, latency=FREE)
        assert without.makespan >= 72  # the work of one rank: nobody hides anything
        running = contests.contestant(name, pairs=True)
        assert running.options == variant(name).options
        assert running.name in schedules.names(synchronous=True, pairs=True)


def test_what_the_tables_show():
    lines = list(contests.table(24))
    assert len(lines) == 2 + len(contests.CONTESTANTS)
    (dualpipe,) = [line.split() for line in lines if line.startswith("dualpipe ")]
    assert dualpipe[1::2][:6] == ["78", "78.75", "93.5", "69", "69.75", "84.5"]
    assert dualpipe[-2:] == ["9", "2"]
