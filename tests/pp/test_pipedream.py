"""PipeDream: the time of a run, versions by counting against closed forms and recorded ones, and what they lead to."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_grid import SIZES

from dualpipe_lab.pp import closed_forms, schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.repeat import repeat
from dualpipe_lab.pp.schedules.pipedream import double_buffered, updates_before, versions_kept, vertical_sync
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import validate

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "pipedream.json").read_text())
ROUNDING = 7 * 8 * 1.3 * sys.float_info.epsilon  # 7 updates of some 8 operations each, on numbers up to 1.3


def test_the_order_is_that_of_1f1b_and_the_pipeline_fills_once(subtests):
    for p, m in SIZES:
        with subtests.test(p=p, m=m):
            program = schedules.pipedream(p, m)
            assert program == schedules.one_f_one_b(p, m)
            validate(program, in_flight=[min(m, p - rank) for rank in range(p)])
            cost = Cost(F=2, I=3, W=1)
            assert simulate(program, cost).makespan == closed_forms.one_f_one_b_makespan(p, m, cost)
            flushed = simulate(repeat(schedules.one_f_one_b(p, m), 3), cost).makespan
            assert flushed == 3 * (m + p - 1) * 6
            assert simulate(schedules.pipedream(p, 3 * m), cost).makespan == (3 * m + p - 1) * 6


def test_versions_by_counting_equal_the_closed_forms(subtests):
    for p, m in SIZES:
        with subtests.test(p=p, m=m):
            program = schedules.pipedream(p, m)
            stashed = updates_before(program)
            assert stashed == [[closed_forms.stashed_version(p, s, j) for j in range(m)] for s in range(p)]
            assert versions_kept(program, stashed) == [closed_forms.stashed_versions_kept(p, s, m) for s in range(p)]
            synced = vertical_sync(stashed)
            assert synced == [[closed_forms.synced_version(p, j) for j in range(m)]] * p
            assert versions_kept(program, synced) == [closed_forms.synced_versions_kept(p, m)] * p
            if m >= 2 * p - 2:
                assert [closed_forms.stashed_versions_kept(p, s, m) for s in range(p)] == [p - s for s in range(p)]
                assert closed_forms.synced_versions_kept(p, m) == p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_two_versions_are_enough_for_batches_of_at_least_p_minus_1(p):
    for size in range(max(p - 1, 1), 2 * p + 2):
        program = schedules.pipedream(p, 4 * size)
        versions = double_buffered(updates_before(program, size), size)
        expected = [closed_forms.double_buffered_version(p, j // size, size) for j in range(4 * size)]
        assert versions == [expected] * p
        assert versions_kept(program, versions, size) == [closed_forms.double_buffered_versions_kept(p)] * p
    if p > 2:
        program = schedules.pipedream(p, 4 * (p - 2))
        late = double_buffered(updates_before(program, p - 2), p - 2)
        assert max(versions_kept(program, late, p - 2)) == 3
        with pytest.raises(ValueError, match=rf"at least P - 1 microbatches, got {p - 2} for {p} ranks; use {p - 1}"):
            closed_forms.double_buffered_version(p, 0, p - 2)


def test_recorded_versions():
    program = schedules.pipedream(ORACLE["p"], len(ORACLE["x"]))
    assert updates_before(program) == ORACLE["version_used"]
    assert versions_kept(program, updates_before(program)) == ORACLE["versions_kept"]


def descend(versions, update_every=1, current_in_backward=False):
    """Gradient descent on 1/2 (w2 w1 w0 x - target)^2 with the given versions; the weights of every stage over time."""
    rate = ORACLE["lr"]
    weights, losses, sums = [[w] for w in ORACLE["w0"]], [], [0.0, 0.0, 0.0]
    for j, (x, target) in enumerate(zip(ORACLE["x"], ORACLE["target"], strict=True)):
        if (j // update_every + 1) * update_every > len(ORACLE["x"]):
            break  # the last batch is not full
        w = [weights[s][versions[s][j]] for s in range(3)]
        inputs = [x, x * w[0], x * w[0] * w[1]]
        dy = inputs[2] * w[2] - target
        losses.append(dy * dy / 2)
        for s in reversed(range(3)):
            sums[s] += dy * inputs[s] / update_every
            dy *= weights[s][-1] if current_in_backward else w[s]
        if (j + 1) % update_every == 0:
            for s in range(3):
                weights[s].append(weights[s][-1] - rate * sums[s])
            sums = [0.0, 0.0, 0.0]
    return weights, losses


@pytest.mark.parametrize("rule", ["sync", "stash", "vertical_sync", "naive"])
def test_the_versions_give_the_recorded_trajectories(rule):
    counted = updates_before(schedules.pipedream(3, 7))
    versions = {"sync": [list(range(7))] * 3, "vertical_sync": vertical_sync(counted)}.get(rule, counted)
    weights, losses = descend(versions, current_in_backward=rule == "naive")
    assert weights == [pytest.approx(row, abs=ROUNDING) for row in ORACLE["expected"][rule]["weights"]]
    assert losses == pytest.approx(ORACLE["expected"][rule]["losses"], abs=ROUNDING)


def test_two_buffers_give_the_recorded_trajectory():
    counted = updates_before(schedules.pipedream(3, 7), update_every=3)
    weights, _ = descend(double_buffered(counted, 3), update_every=3)
    recorded = ORACLE["expected"]["2bw"]["weights"]
    assert [list(step) for step in zip(*weights, strict=True)] == [
        pytest.approx(step, abs=ROUNDING) for step in recorded
    ]


@settings(deadline=None)
@given(p=st.integers(1, 16), m=st.integers(1, 64), every=st.integers(1, 8))
def test_no_version_is_used_before_it_exists_or_after_the_next_rule_would(p, m, every):
    program = schedules.pipedream(p, m)
    counted = updates_before(program, every)
    for s, row in enumerate(counted):
        assert row == [closed_forms.stashed_version(p, s, j) // every for j in range(m)]
    for rule in (vertical_sync(counted), double_buffered(counted, every)):
        assert all(a <= b for own, there in zip(rule, counted, strict=True) for a, b in zip(own, there, strict=True))
        assert all(one == rule[0] for one in rule)


def test_asynchronous_schedules_are_kept_apart():
    assert schedules.names(synchronous=False) == ["pipedream"]
    assert sorted(schedules.names(True) + schedules.names(False)) == sorted(schedules.names())
    assert not schedules.is_synchronous("Pipe-Dream")
    assert schedules.build("pipedream", 2, 2).name == "PipeDream (async)"


def test_copies_of_a_stage_have_no_version():
    rows = ["0F0 1F1 0B0 1B1", "1F0 0F1 1B0 0B1"]
    with pytest.raises(ValueError, match="stage 1 of two is on ranks 0 and 1; its copies would part"):
        updates_before(Program.parse("two", rows))


def test_a_split_backward_updates_after_w():
    program = Program.parse("split", ["0F0 0I0 0F1 0W0 0F2 0I1 0W1 0I2 0W2"])
    assert updates_before(program) == [[0, 0, 1]]
    assert versions_kept(program, updates_before(program)) == [2]
