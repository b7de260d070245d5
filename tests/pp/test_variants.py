"""Variants of a schedule: read, completed, titled, refused."""

import pytest

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules.variants import Variant, variant


def loops(num_ranks, num_microbatches, num_virtual_stages=2, order="forward"):
    rows = [[f"{r}F{m} {r}B{m}" for m in range(num_microbatches)] for r in range(num_ranks)]
    return Program.parse(f"Loops {order} {num_virtual_stages}", [" ".join(row) for row in rows])


@pytest.fixture(autouse=True)
def _loops(monkeypatch):
    monkeypatch.setitem(schedules._KNOWN, "loops", schedules.Schedule("loops", loops))


def test_options_are_read_and_reach_the_builder():
    wanted = variant("loops: virtual-stages=4 , order=reverse")
    assert wanted == Variant("loops", {"num_virtual_stages": 4, "order": "reverse"})
    program = wanted.build(2, 2)
    assert program.name == "Loops reverse 4"
    assert wanted.title(program) == "Loops reverse 4 (4 virtual stages, order reverse)"
    assert variant(str(wanted)) == wanted


def test_its_own_options_win():
    wanted = variant("loops:num_virtual_stages=4").with_options({"virtual_stages": 3, "order": "x"})
    assert wanted.options == {"num_virtual_stages": 4, "order": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lops", "there is no schedule named 'lops'"),
        ("gpipe:stages=2", "gpipe has no option stages; it has none"),
        ("loops:stages=2", "loops has no option stages; it has num_virtual_stages, order"),
        ("loops:", "'' is not option=value"),
        ("loops:4", "'4' is not option=value"),
    ],
)
def test_what_there_is_not_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        variant(text)
