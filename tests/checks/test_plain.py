"""Numbers and positions count whatever type a learner's arithmetic has left them in; a bool is no number."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from dualpipe_course.plain import plain
from dualpipe_course.registry import all_checks
from dualpipe_course.trial import needs_ints
from dualpipe_course.variants import Variants
from dualpipe_course.wrong import Wrong

PREDICT = [check.name for check in all_checks() if check.about.kind == "predict"]
STYLES = {
    "int": int,
    "float": float,
    "fraction": Fraction,
    "numpy int": np.int64,
    "numpy float": np.float64,
    "numpy array": np.array,
    "tensor": torch.tensor,
    "tensor of floats": lambda value: torch.tensor(float(value), dtype=torch.float64),
}


def seven(slips):
    """One number, which is 7."""
    return Variants(("a",), lambda: (7,), slips=(slips,))


def test_a_whole_number_counts_in_every_type(subtests):
    for style in STYLES.values():
        with subtests.test(style=style):
            assert needs_ints((style(6), style(245_760_000)), ("a", "b")) == [6, 245_760_000]
            assert needs_ints(style(-7), ("a",)) == [-7]
            assert Variants(("a", "b"), lambda: (6, 2)).judge((style(6), 2), None) == "a 6, b 2"
            with pytest.raises(Wrong, match=r"a, 6: as many as ranks"):
                seven({6: "as many as ranks"}).judge(style(6), None)


def test_what_is_no_whole_number_is_refused(subtests):
    answers = [True, np.True_, torch.tensor(True), 2.5, Fraction(1, 3), "6", None, float("nan"), float("inf"), 6j]
    for answer in answers:
        with subtests.test(answer=answer), pytest.raises(Wrong, match="must be a whole number"):
            needs_ints(answer, ("a",))
    with pytest.raises(Wrong, match="not answered yet"):
        needs_ints(..., ("a",))
    with pytest.raises(Wrong, match="got 3"):
        needs_ints([1, 2, 3], ("a",))


def test_a_known_fraction_gets_its_reason_and_no_other_does():
    variants = seven({28 / 3: "as many as ranks", 9: "whole"})
    for answer in (28 / 3, 9.33, 9.3, Fraction(28, 3)):
        with pytest.raises(Wrong, match=r"a, 9\.3+: as many as ranks"):
            variants.judge(answer, None)
    for answer in (9.03, 9.2):
        with pytest.raises(Wrong, match="must be a whole number"):
            variants.judge(answer, None)


def test_a_formula_with_fractions_ends_at_its_whole_number():
    assert plain((1 - 1 / 3) * 6000) == 4000
    assert plain(2 * (7 / 8) * 98_304) == 172_032
    assert plain(2.0**40 + 0.25) == 2.0**40 + 0.25
    assert type(plain(6000.0000001)) is float


def test_positions_are_lists_of_ints_from_anything():
    rows = [[0, 1], [2, 3]]
    for answer in (rows, tuple(map(tuple, rows)), torch.tensor(rows), np.array(rows), list(torch.tensor(rows))):
        assert plain(answer) == rows
    assert plain([range(2), np.array([2.0, 3.0])]) == rows
    assert plain([...]) == [...]
    assert plain(torch.Tensor) is torch.Tensor


@pytest.mark.parametrize("name", PREDICT)
def test_every_predicted_number_may_be_a_whole_float_or_a_tensor(book, name):
    """All predict checks share the comparison; this finds one that does not."""
    from dualpipe_course.registry import find

    arguments = book.arguments(name, book.answer(name))
    for style in (float, torch.tensor):
        verdict = find(name).verdict(*[_restyled(value, style) for value in arguments])
        assert verdict.passed, verdict.message


def _restyled(value, style):
    return type(value)(style(part) for part in value) if isinstance(value, (list, tuple)) else style(value)
