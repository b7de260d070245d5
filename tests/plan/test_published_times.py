"""Seconds per step of MLPerf's Llama 3.1 405B series, one calibration point per machine; `pytest -s` prints all."""

import pytest

from dualpipe_course.whole.published import mlperf


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
