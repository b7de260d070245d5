"""The one comparison: which value is named first, what is said of it, which limit is broken; no process is started."""

from types import SimpleNamespace

import pytest

from dualpipe_course.comparison import Found, Limit, Numbers, check_found, check_limit, first_off, in_words
from dualpipe_course.wrong import Wrong

ONE = Numbers((2,), [1.0, 2.0])
TWICE = Numbers((2,), [2.0, 4.0])


def said(found, **options):
    with pytest.raises(Wrong) as raised:
        check_found(found, "2 ranks", **options)
    return raised.value.message


def test_names_come_before_ranks():
    found = [Found({"y": ONE, "dx": TWICE}), Found({"y": TWICE, "dx": ONE})]
    off = first_off(found, [{"y": ONE, "dx": ONE}] * 2)
    assert (off.name, off.rank, off.by_rank) == ("y", 1, [ONE, TWICE])
    assert first_off(found, [found[0].values, found[1].values]) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "y is missing"),
        (Numbers((1, 2), ONE.flat), "y has shape [1, 2], this rank's is [2]"),
        (
            Numbers((2,), [1.0, float("nan")]),
            "y differs from one process: number 1 is nan, expected 2; it is not finite: read before "
            "it was written or gathered, or divided by zero",
        ),
        (
            Numbers((2,), [1.5, 2.0]),
            "y differs from one process: number 0 is 1.5, expected 1; it is right on rank 0 "
            "alone: the result does not reach the others, or is changed there",
        ),
    ],
)
def test_what_is_wrong_with_a_value(value, words):
    assert said([Found({"y": ONE}, {"y": ONE}), Found({"y": value}, {"y": ONE})]) == f"2 ranks: rank 1: {words}"


def test_a_slip_is_known_by_its_value():
    slips = {"y": {"it is squared": Numbers((2,), [1.0, 4.0]), "it is doubled": TWICE}}
    assert said([Found({"y": TWICE}, {"y": ONE}, slips)]).endswith("rank 0: y: it is doubled")


def test_the_table_of_causes_sees_the_ranks_that_are_to_have_the_same():
    parts = [Found({"y": Numbers((2,), [0.25, 2.0])}), Found({"y": Numbers((2,), [0.75, 0.0])})]
    assert "number 0 is 0.25, expected 1; the ranks have partial sums" in said(parts, beside=lambda: [{"y": ONE}] * 2)
    assert said(parts, beside=lambda: [{"y": ONE}, {"y": TWICE}]).endswith("number 0 is 0.25, expected 1")
    assert "2 times that of one process, the number of ranks" in said([Found({"y": TWICE}, {"y": ONE})] * 2)


def test_what_is_refused_comes_first_and_what_has_changed_last():
    off, changed = Found({"y": TWICE}, {"y": ONE}), Found({"y": ONE}, {"y": ONE}, changed="x has changed")
    assert said([off, Found({}, refused="no tensor")]) == "2 ranks: rank 1: no tensor"
    assert said([off, changed]).endswith("2 times that of one process, and right on rank 1")
    assert said([changed]) == "2 ranks: rank 0: x has changed"


def test_a_tolerance_of_zero_compares_every_bit():
    near, same = Numbers((2,), [1.0, 2.0 + 2**-51]), Numbers((1,), [float("-inf")])
    assert near.equals(ONE)
    assert not near.equals(ONE, tolerance=0)
    assert same.equals(same, tolerance=0)
    assert "number 1" in said([Found({"y": near}, {"y": ONE})], tolerance=0)


def results_of(costs, sent=()):
    class Ledger:
        def sent(self, operation, rank):
            return sum(sent) if rank is None else sent[rank]

    class Results(list):
        ledger, timeline = Ledger(), "the picture"

    return Results(Found({}, costs=cost) for cost in costs)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (Limit("ms", 5, "{found} ms, {most} are enough"), "8 ms, 5 are enough"),
        (Limit("ms", 4, "rank {rank}: {found}", scope="each"), "rank 1: 5"),
        (Limit("ms", 4, "{found} on rank {rank}", scope="largest"), "5 on rank 1"),
        (Limit("ms", 8, "{found} of {most}", 9), "8 of 8"),
        (Limit("ms", [3, 4], "rank {rank} takes {found}, not {most}", scope="each"), "rank 1 takes 5, not 4"),
        (Limit("bytes", 6, "{found:,} bytes"), "7,000 bytes"),
        (Limit("ms", 8, ""), None),
        (Limit("ms", [3, 5], "", [3, 5], scope="each"), None),
    ],
)
def test_limits(limit, words):
    results = results_of([{"ms": 3}, {"ms": 5}], sent=(3000, 4000))
    if words is None:
        check_limit(results, limit, "2 ranks")
        return
    with pytest.raises(Wrong) as raised:
        check_limit(results, limit._replace(shows=True), "2 ranks")
    assert (raised.value.message, raised.value.picture) == (f"2 ranks: {words}", "the picture")


def test_the_words_can_be_those_of_the_check():
    assert said([Found({"y": TWICE}, {"y": ONE})], why=lambda off: f"{off.ratio:g} x", at=", rank {rank} ") == (
        "2 ranks, rank 0 2 x"
    )
    assert in_words(SimpleNamespace(found=None, name="dx")) == "dx is missing"
