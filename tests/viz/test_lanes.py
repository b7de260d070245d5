"""Rows of spans: every bar at its time, inside of the picture, as text too; what overlaps is refused."""

import pytest
from scenes import SVG, drawn, place, words

from dualpipe_lab.timeline import Span
from dualpipe_lab.viz import Lanes

MS = 1_000_000


def test_bars_lie_at_their_times():
    rows = {
        "rank 0 < work": [Span(0, 10 * MS, 30 * MS, "B", label="B & 1"), Span(0, 0, 10 * MS, "F")],
        "link": [Span(0, 25 * MS, 40 * MS, "collective", label="a name too long for its bar, by far")],
    }
    lanes = Lanes("sums > work", rows)
    root = drawn(lanes)
    bars = [(x, width + 1) for x, _, width, _ in map(place, root.findall(f"{SVG}rect"))]
    left, unit = bars[0][0], bars[0][1] / 10
    assert [((x - left) / unit, width / unit) for x, width in bars] == [
        pytest.approx(expected, abs=0.02) for expected in ((0, 10), (10, 20), (25, 15))
    ]
    assert {"B & 1", "F", "a", "0 ms", "40"} <= set(words(root))
    assert str(lanes).splitlines()[1] == "rank 0 < work  F 0-10, B & 1 10-30"


def test_nothing_to_draw_and_spans_that_overlap_are_refused():
    with pytest.raises(ValueError, match="need a row with a span"):
        Lanes("empty", {"work": []})
    with pytest.raises(ValueError, match="'work', F begins before B ends"):
        Lanes("two at once", {"work": [Span(0, 0, 5, "B"), Span(0, 4, 6, "F")]})
