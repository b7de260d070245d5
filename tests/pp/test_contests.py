"""The table of contests: what two directions, the split backward and the overlap bring."""

from fractions import Fraction
from pathlib import Path

from scripts import load

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.schedules.variants import variant

contests = load(Path(__file__).parents[2] / "benchmarks" / "contests.py")


def test_one_rule_for_all():
    names = {variant(name).name for name in contests.CONTESTANTS}
    assert names == set(schedules.names(synchronous=True, pairs=False)) - {"looped_bfs"}  # as interleaved, holding all
    for name in contests.CONTESTANTS:
        without = contests.contest(name, 24, pairs=False, latency=Fraction(0))
        assert without.makespan >= 72  # the work of one rank: nobody hides anything
        running = contests.contestant(name, pairs=True)
        assert running.options == variant(name).options
        assert running.name in schedules.names(synchronous=True, pairs=True)


def test_what_the_tables_show():
    lines = list(contests.table(24))
    assert len(lines) == 2 + len(contests.CONTESTANTS)
    (dualpipe,) = [line.split() for line in lines if line.startswith("dualpipe ")]
    assert dualpipe[1::2][:6] == ["78", "78.75", "93.5", "69", "69.75", "84.5"]
    assert dualpipe[-2:] == ["9", "2"]
