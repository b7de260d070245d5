"""What a rank waits for, in words: complete, true to the slow reference, and short."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_reference import makers, random_cost, random_program, solve

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.explain import explain
from dualpipe_lab.pp.program import Program, actions_of, parse_action
from dualpipe_lab.pp.simulator import simulate


@given(st.randoms(use_true_random=False))
def test_every_wait_is_told_with_its_true_cause(rng):
    program = random_program(rng)
    cost = random_cost(rng, program.num_stages)
    told, timeline, times = explain(program, cost), simulate(program, cost), solve(program, cost)
    assert told.timeline == timeline
    assert told.problems == ()
    for rank in range(program.num_ranks):
        mine = [pause for pause in told.pauses if pause.rank == rank]
        assert sum(pause.ticks for pause in mine) == timeline.bubble_time(rank)
        assert all(one.end <= other.start for one, other in pairwise(mine))
        first = times[actions_of(program.ranks[rank][0])[0]][0]
        assert [p.ticks for p in mine if p.phase == "warm-up"] == ([first] if first else [])
    for pause in told.pauses:
        if pause.phase == "cool-down":
            assert pause.end == timeline.makespan
            assert pause.beside == str(program.ranks[pause.rank][-1])
            continue
        needed = parse_action(pause.needed)
        inputs = [m for action in actions_of(parse_action(pause.beside)) for m in makers(action, program.num_stages)]
        assert needed in inputs
        assert program.rank_of(needed.stage, needed.microbatch) == pause.source != pause.rank
        assert pause.what == ("activation" if needed.kind == "F" else "gradient")
        assert pause.end == times[actions_of(parse_action(pause.beside))[0]][0]
        made = times[needed][1]
        assert pause.on_link == pause.end - max(pause.start, made)
        assert cost.latency + cost.transfer > 0 or (pause.on_link == 0 and pause.end == made)


def test_a_wait_is_a_sentence():
    told = str(explain(schedules.gpipe(4, 2), Cost(F=1, B=2)))
    assert (
        "rank 0 works 6 ticks and waits 9\n  in between: 9 ticks before 0B0 for the gradient of 1B0 from rank 1" in told
    )
    assert "  warm-up:    3 ticks before 3F0 for the activation of 2F0 from rank 2" in told
    assert "  cool-down:  6 ticks after 3B1 for the last rank to end" in told
    told = str(explain(schedules.gpipe(2, 1), Cost(F=Fraction(1, 2), B=1, latency=1)))
    assert "warm-up:    1.5 ticks before 1F0 for the activation of 0F0 from rank 0 (1 on the link)" in told
    assert str(explain(schedules.gpipe(1, 2))).endswith("in between 0, cool-down 0\nrank 0 works 6 ticks and waits 0")


def test_many_microbatches_and_ranks_stay_readable():
    text = str(explain(schedules.build("dualpipe", 32, 128)))
    assert len(text.splitlines()) < 120
    assert "and 16 more ranks, told by of_rank(16) and so on" in text
    assert max(map(len, text.splitlines())) < 140


def test_an_invalid_program_is_told_by_its_problems():
    told = explain(Program.parse("broken", ["0F0 0B0 0B1"]))
    assert str(told) == "broken cannot run:\n  - stage 0, microbatch 1: B without F"
    assert told.timeline is None
    with pytest.raises(ValueError, match="broken cannot run"):
        told.of_rank(0)
