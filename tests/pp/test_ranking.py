"""Scores: fair to smaller stages, and right about steps that follow without a barrier."""

from fractions import Fraction
from itertools import product

from schedule_grid import legal

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.ranking import ranked, score, stage_cost
from dualpipe_lab.pp.repeat import step_time

COSTS = [Cost(), Cost(F=2, I=4, W=2), Cost(F=4, I=2, W=6, latency=3), Cost(F=2, I=2, W=0, overlap=3)]


def test_the_window_is_what_a_step_takes_without_a_barrier(subtests):
    for cost, name in product(COSTS, schedules.names(synchronous=True)):
        with subtests.test(cost=cost, name=name):
            for program in legal(name, [(1, 2), (2, 3), (2, 8), (3, 6), (4, 4), (4, 10)]):
                counted = score(program, cost)
                assert counted.window == step_time(program, stage_cost(program, cost))
                assert counted.makespan == step_time(program, stage_cost(program, cost), barrier=True)


def test_work_weights_and_memory_do_not_depend_on_how_small_the_stages_are():
    counted = [score(schedules.build("looped_bfs", 4, 8, num_virtual_stages=v), Cost(F=6, I=6, W=6)) for v in (1, 2, 3)]
    assert {(one.peak, one.weights) for one in counted} == {(8, 1)}
    assert [one.makespan - 8 * 18 for one in counted] == [Fraction(3 * 18, v) for v in (1, 2, 3)]


def test_what_exceeds_the_memory_comes_last():
    scores = [score(schedules.build(name, 4, 8)) for name in ("gpipe", "zero_bubble_h2", "1f1b", "zero_bubble_h1")]
    assert [one.name for one in ranked(scores, memory=4)] == ["ZB-H1", "1F1B", "ZB-H2", "GPipe"]
    assert [one.name for one in ranked(scores, barrier=False)] == ["ZB-H2", "ZB-H1", "1F1B", "GPipe"]
