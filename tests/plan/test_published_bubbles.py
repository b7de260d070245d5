"""The 36 bubble rates that the Zero Bubble paper has for its own profiled times, to the four digits it prints."""

import pytest

from dualpipe_course.whole.published import bubbles


@pytest.mark.parametrize("row", bubbles.ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_published_bubble_rates(row):
    pairs = list(bubbles.pairs(row))
    assert len(pairs) == 3
    assert [f"{pair.estimated:.4f}" for pair in pairs] == [f"{pair.published:.4f}" for pair in pairs]
