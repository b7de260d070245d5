"""Scores: fair to smaller stages, and right about steps that follow without a barrier."""

from fractions import Fraction

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.ranking import ranked, score


def test_work_weights_and_memory_do_not_depend_on_how_small_the_stages_are():
    counted = [score(schedules.build("looped_bfs", 4, 8, num_virtual_stages=v), Cost(F=6, I=6, W=6)) for v in (1, 2, 3)]
    assert {(one.peak, one.weights) for one in counted} == {(8, 1)}
    assert [one.makespan - 8 * 18 for one in counted] == [Fraction(3 * 18, v) for v in (1, 2, 3)]


def test_what_exceeds_the_memory_comes_last():
    scores = [score(schedules.build(name, 4, 8)) for name in ("gpipe", "zero_bubble_h2", "1f1b", "zero_bubble_h1")]
    assert [one.name for one in ranked(scores, memory=4)] == ["ZB-H1", "1F1B", "ZB-H2", "GPipe"]
    assert [one.name for one in ranked(scores, barrier=False)] == ["ZB-H2", "ZB-H1", "1F1B", "GPipe"]
