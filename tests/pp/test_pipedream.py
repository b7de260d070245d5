"""PipeDream: the time of a run, versions by counting against closed forms and recorded ones, and what they lead to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules.pipedream import double_buffered, updates_before, versions_kept, vertical_sync


def stashed_version(p, stage, minibatch):
    return max(0, minibatch - (p - 1 - stage))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_two_versions_are_enough_for_batches_of_at_least_p_minus_1(p):
    for size in range(max(p - 1, 1), 2 * p + 2):
        program = schedules.pipedream(p, 4 * size)
        versions = double_buffered(updates_before(program, size), size)
        expected = [max(0, j // size - min(1, p - 1)) for j in range(4 * size)]
        assert versions == [expected] * p
        assert versions_kept(program, versions, size) == [min(2, p)] * p
    if p > 2:
        program = schedules.pipedream(p, 4 * (p - 2))
        late = double_buffered(updates_before(program, p - 2), p - 2)
        assert max(versions_kept(program, late, p - 2)) == 3


@given(p=st.integers(1, 16), m=st.integers(1, 64), every=st.sampled_from([1, 1, 1, 2, 3, 8]))
def test_no_version_is_used_before_it_exists_or_after_the_next_rule_would(p, m, every):
    program = schedules.pipedream(p, m)
    assert program == schedules.one_f_one_b(p, m)
    counted = updates_before(program, every)
    for s, row in enumerate(counted):
        assert row == [stashed_version(p, s, j) // every for j in range(m)]
    if every == 1 and m >= 2 * p - 2:
        synced = vertical_sync(counted)
        assert synced == [[stashed_version(p, 0, j) for j in range(m)]] * p
        assert versions_kept(program, counted) == [p - s for s in range(p)]
        assert versions_kept(program, synced) == [p] * p
    for rule in (vertical_sync(counted), double_buffered(counted, every)):
        assert all(a <= b for own, there in zip(rule, counted, strict=True) for a, b in zip(own, there, strict=True))
        assert all(one == rule[0] for one in rule)


def test_copies_of_a_stage_have_no_version():
    rows = ["0F0 1F1 0B0 1B1", "1F0 0F1 1B0 0B1"]
    with pytest.raises(ValueError, match="stage 1 of two is on ranks 0 and 1; its copies would part"):
        updates_before(Program.parse("two", rows))


def test_a_split_backward_updates_after_w():
    program = Program.parse("split", ["0F0 0I0 0F1 0W0 0F2 0I1 0W1 0I2 0W2"])
    assert updates_before(program) == [[0, 0, 1]]
    assert versions_kept(program, updates_before(program)) == [2]
