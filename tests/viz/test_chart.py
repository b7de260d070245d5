"""Line charts: every point at its place, inside of the picture, as text too."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import SVG, drawn, words

from dualpipe_lab.viz import Chart

LEGEND = 230  # px from the top
NUMBERS = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
LINES = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8), min_size=1, max_size=6)


def places(chart):
    """The corners of every line that is drawn, in pixels; the samples of the legend stand below them."""
    root = drawn(chart)
    paths = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("stroke-width") == "2"]
    lines = [[tuple(map(float, point)) for point in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)] for path in paths]
    return [line for line in lines if line[0][1] < LEGEND], root


@settings(max_examples=20, deadline=None)
@given(LINES, st.booleans())
def test_every_line_is_inside_of_the_picture(lines, stepped):
    named = {f"line {index}": sorted(points) for index, points in enumerate(lines)}
    found, root = places(Chart("a < b", named, x="step & more", y="y", stepped=stepped))
    assert [len(line) for line in found] == [2 * len(p) - 1 if stepped else len(p) for p in named.values()]
    _, _, width, height = map(float, root.get("viewBox").split())
    for line in found:
        assert all(0 <= x <= width and 0 <= y <= height for x, y in line)
    assert {"a < b", "step & more", *named} <= set(words(root))


def test_points_lie_where_their_numbers_say():
    ((line, flat), _) = places(Chart("", {"up": [(0, 0), (1, 1), (3, 2)], "flat": [(0, 0), (3, 0)]}, "x", "y"))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 - x0 == pytest.approx((x2 - x0) / 3, abs=0.1)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1 > y2  # up is up
    assert {y for _, y in flat} == {y0}


def test_a_step_keeps_its_value_until_the_next_point():
    ((line,), _) = places(Chart("", {"scale": [(0, 4), (1, 2), (2, 4)]}, "step", "scale", stepped=True))
    xs, ys = zip(*line, strict=True)
    assert (xs[1], xs[3]) == (xs[2], xs[4])
    assert ys[0] == ys[1] == ys[4]
    assert ys[2] == ys[3] > ys[0]


def test_a_dot_lies_on_its_line_exactly_if_the_numbers_agree():
    lines = {"derived": [(1, 16), (2, 8), (8, 2)]}
    for counted, apart in ((8, 0), (10, 1)):
        chart = Chart("", lines, "ranks", "bytes", dots={"derived": [(2, counted)]}, even=True)
        ((line,), root) = places(chart)
        ((dot_x, dot_y),) = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]
        assert dot_x == line[1][0]
        assert (dot_y < line[1][1]) == bool(apart)
        assert (dot_y == line[1][1]) != bool(apart)
    assert str(chart).splitlines()[1:3] == ["ranks  derived  derived, dots", "    1       16"]


def test_places_are_to_scale_or_even():
    points = {"bytes": [(1, 16), (2, 8), (8, 2)]}
    for even, ratio in ((False, 6), (True, 1)):
        ((line,), _) = places(Chart("", points, "ranks", "bytes", even=even))
        assert line[2][0] - line[1][0] == pytest.approx(ratio * (line[1][0] - line[0][0]), rel=0.02)


def test_what_cannot_be_drawn_is_refused():
    for lines in ({}, {"a": []}, {str(index): [(0, 0)] for index in range(7)}):
        with pytest.raises(ValueError, match="1 to 6 lines with points"):
            Chart("title", lines, "x", "y")
    with pytest.raises(ValueError, match="none named 'b'"):
        Chart("title", {"a": [(0, 0)]}, "x", "y", dots={"b": [(0, 0)]})


def test_axes_have_round_numbers_from_end_to_end():
    lines = {"": [(0.1, -2e-7), (0.9, 9e-7)]}
    assert [text for text in words(drawn(Chart("", lines, "x", "y"))) if text and text[0] in "-0123456789"] == [
        *("0.2", "0.4", "0.6", "0.8"), *("-2e-07", "0", "2e-07", "4e-07", "6e-07", "8e-07"),
    ]  # fmt: skip


def test_a_line_has_a_gap_where_a_number_is_not_finite():
    for missing in (float("nan"), float("inf")):
        chart = Chart("", {"loss": [(0, 1), (1, 2), (2, missing), (3, 1), (4, 2)]}, "step", "loss")
        (path, _) = drawn(chart).findall(f"{SVG}path[@stroke-width='2']")
        assert [len(part.split("L")) for part in path.get("d").split("M")[1:]] == [2, 2]


def test_colours_are_the_theme_s_and_text_stays_text():
    chart = Chart("costs $2 and $3", {str(index): [(0, index), (1, 2)] for index in range(6)}, "x", "y")
    root, text = drawn(chart), chart.to_svg()
    assert re.sub(r"var\([^)]*\)", "", text).count("#") == 0
    assert {f"--dp-line-{index}" for index in range(1, 6)} <= set(re.findall(r"--dp-line-\d", text))
    assert "costs $2 and $3" in words(root)
    assert not list(root.iter(f"{SVG}style"))  # its rules would apply to the whole page
    assert root.get("aria-label") == "costs $2 and $3: y over x"
