"""Efficiencies by size: lines over log(size), and what is refused."""

from itertools import pairwise

import pytest

from dualpipe_lab.plan import Accelerator, Efficiency

CURVE = Efficiency(0.9, "measured", ((1e3, 0.1), (1e5, 0.5), (1e6, 0.9)))


@pytest.mark.parametrize(
    ("size", "part"), [(1.0, 0.1), (1e3, 0.1), (1e4, 0.3), (1e5, 0.5), (10**5.5, 0.7), (1e6, 0.9), (1e12, 0.9)]
)
def test_a_curve_is_a_line_between_its_points(size, part):
    assert CURVE.at(size) == pytest.approx(part)


def test_a_curve_has_no_steps_and_one_value_is_a_constant():
    sizes = [10 ** (2 + step / 50) for step in range(300)]
    parts = [CURVE.at(size) for size in sizes]
    assert parts == sorted(parts)
    assert max(after - before for before, after in pairwise(parts)) < 0.01
    assert Efficiency(0.7).at(1) == Efficiency(0.7).at(1e15) == 0.7
    assert Efficiency(0.5, points=((10.0, 0.5),)).at(3) == 0.5


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (((1.0, 1.5),), "at most 1, got 1.5"), (((1.0, 0.0),), "above 0"), (((2.0, 0.5), (1.0, 0.6)), "ascend"),
        (((1.0, 0.5), (1.0, 0.6)), "ascend"), (((0.0, 0.5),), "above 0"),
    ],
)  # fmt: skip
def test_odd_points_are_refused(points, message):
    with pytest.raises(ValueError, match=message):
        Efficiency(1.0, "measured", points)


@pytest.mark.parametrize("overhead", [-1e-6, float("inf"), "1"])
def test_an_odd_overhead_is_refused(overhead):
    with pytest.raises(ValueError, match="overhead of x's kernels"):
        Accelerator("x", {"float32": 1.0}, 1, 1.0, overhead=overhead)
