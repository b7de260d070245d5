"""Seconds per step of MLPerf's Llama 3.1 405B series, one calibration point per machine; `pytest -s` prints all."""

import pytest

from dualpipe_course.whole.published import mlperf
from dualpipe_lab.cli.plan import _CAUTION


@pytest.mark.parametrize("name", mlperf.SERIES)
def test_a_series_is_predicted_from_its_first_row(name):
    point, *rows = mlperf.steps(name)
    assert point[0].is_point
    assert abs(point[0].error) < 1e-9
    for pair, step in rows:
        print(f"{pair.name}: measured {pair.published:6.3f} s, predicted {pair.estimated:6.3f}, {pair.error:+.1%}")
        assert not pair.is_point
        assert abs(pair.error) <= 0.08
        assert step.least <= pair.published <= step.most


def test_the_factors_of_the_points_are_those_that_texts_say():
    """The command line and the page on planning a run: 1.4 to 1.7 times what is estimated without a calibration."""
    found = {name: mlperf.factor(name) for name in mlperf.SERIES}
    print(found)
    assert {name: round(factor, 3) for name, factor in found.items()} == {"h100": 1.368, "h200": 1.466, "gb200": 1.705}
    assert (f"{min(found.values()):.1f}", f"{max(found.values()):.1f}") == ("1.4", "1.7")
    assert "took 1.4 to 1.7 times what is estimated" in _CAUTION
