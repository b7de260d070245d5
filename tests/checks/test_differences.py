"""A message never shows two numbers that look alike, and no factor that prints as 1."""

from itertools import product
from math import inf, nan

from dualpipe_course.differences import apart, difference
from dualpipe_lab.launch.causes import multiple


def test_the_two_numbers_look_different(subtests):
    for relative, expected in product(
        [2.0**-50, 1e-12, 6e-8, 1e-6, 1e-3, 1.0], [1.92286, 0.2236067977, 2.0**24, 1e-3, -5.0]
    ):
        with subtests.test(relative=relative, expected=expected):
            both = apart(expected * (1 + relative), expected)
            assert both.found != both.expected
            assert ("float32" in both.why) == (6e-8 <= relative <= 1e-6 and len(both.found) > 7)


def test_why_says_how_far_apart_they_are_and_how_far_they_may_be():
    assert str(apart(2.5, 2.0)) == "is 2.5, expected 2"
    assert "1e-13 apart, allowed is 1e-14" in str(apart(1.0 + 1e-13, 1.0, 1e-14))
    assert "allowed is 5e-12" in str(apart(5.0000001, 5.0))
    assert (str(apart(nan, 1.0)), str(apart(1.0, -inf))) == ("is nan, expected 1", "is 1, expected -inf")
    assert str(apart(nan, nan)) == "is nan, expected nan"


def test_a_factor_of_float32s_rounding_is_no_factor():
    theirs = [1.0, -3.0, 2.0]
    ours = [value * (1 + 6e-8) for value in theirs]
    assert multiple(ours, theirs) is None
    off = difference(ours, theirs)
    assert off.ratio is None
    assert "float32" in str(off)
    assert "float32" not in str(difference([1.0, -3.0, 2.5], theirs))
    assert multiple([2 * value for value in theirs], theirs) == 2
    assert multiple([0.0, 0.0, 0.0], theirs) == 0
    assert multiple([], []) is None
    assert multiple([nan, nan, nan], theirs) is None
