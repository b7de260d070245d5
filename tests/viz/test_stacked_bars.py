"""Rows of pieces: every piece at its place, all pieces of a label in one element, as text too."""

import re

import pytest
from scenes import SVG, drawn, place, words

from dualpipe_lab.viz import StackedBars

ROWS = {"rank 0": [("0", 4), ("a&b", 1)], "rank 1": [("0", 4), ("1", 3), ("2", 0)]}


def bars(parent):
    """(left, width) of its rectangles."""
    return [place(bar)[::2] for bar in parent.findall(f"{SVG}rect")]


def dashed(root):
    """The place of the dashed line."""
    (line,) = root.findall(f"{SVG}path[@stroke-dasharray]")
    return float(re.match(r"M([\d.]+) ", line.get("d"))[1])


def test_pieces_lie_one_after_the_other():
    stacks = StackedBars("a > b", ROWS)
    root = drawn(stacks)
    groups = root.findall(f"{SVG}g")
    assert [group.get("aria-label") for group in groups] == [
        "expert 0: 4 on rank 0, 4 on rank 1",
        "expert a&b: 1 on rank 0",
        "expert 1: 3 on rank 1",
        "expert 2: 0 on rank 1",
    ]
    pieces = [[(left, width + 1) for left, width in bars(group)] for group in groups]
    left, unit = pieces[0][0][0], pieces[0][0][1] / 4
    assert pieces[0][0] == pieces[0][1]
    assert pieces[1][0] == (pytest.approx(left + 4 * unit, abs=0.2), pytest.approx(unit, abs=0.2))
    assert pieces[2][0] == (pytest.approx(left + 4 * unit, abs=0.2), pytest.approx(3 * unit, abs=0.2))
    later = [list(root).index(shape) for shape in (*root.findall(f"{SVG}rect"), *root.findall(f"{SVG}path"))]
    assert list(root).index(groups[-1]) < min(later)  # these let the pointer through
    assert ".dp-piece~*{pointer-events:none}" in root.find(f"{SVG}style").text
    ((_, width),) = bars(root)
    assert width == pytest.approx(7 * unit, abs=0.2)  # the heaviest row
    assert dashed(root) == pytest.approx(left + 6 * unit, abs=0.2)
    assert {"rank 0", "rank 1", "5", "7", "a > b", "heaviest 7 tokens, mean 6, max/mean 1.167"} <= set(words(root))


def test_every_word_stays_inside():
    root = drawn(StackedBars("much", {"rank 0": [("0", 12345.6)], "rank 1": [("1", 1)]}))
    width = float(root.get("viewBox").split()[2])
    for text in root.iter(f"{SVG}text"):
        if text.get("text-anchor") is None:
            assert float(text.get("x")) + 6.4 * len(text.text) <= width


def test_no_number_stands_on_the_line_of_the_mean():
    for light in range(40, 60):
        root = drawn(StackedBars("near", {"rank 0": [("0", light)], "rank 1": [("1", 60)]}))
        mean = dashed(root)
        for text in root.iter(f"{SVG}text"):
            if text.text in (str(light), "60"):
                left = float(text.get("x"))
                assert not left < mean < left + 6 * len(text.text), light


def test_nothing_to_draw_is_refused():
    for rows in ({}, {"rank 0": []}, {"rank 0": [("0", 0)]}, {"rank 0": [("0", 2), ("1", -1)]}):
        with pytest.raises(ValueError, match="sizes above 0"):
            StackedBars("nothing", rows)


def test_a_limit_stands_in_place_of_the_mean():
    stacks = StackedBars("a limit", {"1 GPU": [("a", 9), ("b", 4)], "1 of 8": [("a", 3)]}, "bytes", "GB", ("H100", 10))
    assert stacks.summary == "largest 13 GB; H100: 10 GB"
    root = drawn(stacks)
    ((left, width),) = bars(root)
    assert dashed(root) - left == pytest.approx(width * 10 / 13, abs=0.5)
    beyond = drawn(StackedBars("all fit", ROWS, limit=("limit", 70)))
    assert not bars(beyond)
    assert dashed(beyond) < float(beyond.get("viewBox").split()[2])
    with pytest.raises(ValueError, match="above 0, got"):
        StackedBars("none", ROWS, limit=("none", 0))
