"""Easy-DualPipe, DualPipe and DualPipeV: the published orders, validity, peaks, idle time and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import ORACLES, SIZES, legal
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import Action, Overlap, Program
from dualpipe_lab.pp.schedules.dualpipe import eight_steps
from dualpipe_lab.pp.validation.validator import validate


@pytest.mark.parametrize(("name", "p", "m"), [("dualpipe", 8, 20), ("dualpipev", 4, 10)])
def test_the_published_program_action_by_action(name, p, m):
    rows = ORACLES[f"{name} {p} ranks {m} microbatches"]
    assert schedules.build(name, p, m).rows() == rows


class FakeStage:
    """As much of a stage as torch's constructor of a schedule asks for."""

    submod, device, has_backward, is_first, is_last = None, "cpu", True, False, False

    def __init__(self, stage_index, p):
        self.stage_index, self.num_stages, self.group, self.group_rank, self.group_size = stage_index, 2 * p, None, 0, p
        self.stage_index_to_group_rank = {}


def test_dualpipev_has_the_order_of_torch(subtests):
    for p, m in [(p, m) for p, m in SIZES if m >= 2 * p]:
        with subtests.test(p=p, m=m):
            theirs = ScheduleDualPipeV([FakeStage(0, p), FakeStage(2 * p - 1, p)], m, loss_fn=None)
            orders = {rank: theirs._calculate_single_rank_operations(rank) for rank in range(p)}
            found = schedules.dualpipev(p, m).rows()
            for rank, order in orders.items():
                assert found[rank] == " ".join(str(action) for action in order if action is not None)


def one_numbering(step, m):
    """Direction 1 counted from 0, as on the way back of a V."""
    if isinstance(step, Overlap):
        return Overlap(*(one_numbering(part, m) for part in step))
    return Action(step.stage, step.kind, step.microbatch % m)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (1, 5), (2, 4), (3, 7), (4, 10), (8, 17)])
def test_dualpipe_cut_in_half_is_dualpipev(p, m):
    whole = schedules.dualpipe(2 * p, 2 * m)
    half = [[one_numbering(step, m) for step in steps] for steps in whole.ranks[:p]]
    assert half == [list(steps) for steps in schedules.dualpipev(p, m).ranks]


@given(half=st.integers(1, 8), more=st.integers(0, 16))
def test_any_size_is_valid_and_holds_no_more_than_stated(half, more):
    p, m = 2 * half, 2 * (2 * half + more)
    for program, held in (
        (schedules.easy_dualpipe(p, 2 + 2 * more), min(p, 2 + 2 * more)),
        (schedules.dualpipe(p, m), p + 1),
        (schedules.dualpipev(half, m // 2), p + 1),
    ):
        validate(lower(validate(program, in_flight=held)), blocking=True)


def test_every_size_of_the_grid_exists_or_is_refused_for_its_rule():
    exists = {name: {(p.num_ranks, p.num_microbatches) for p in legal(name)} for name in schedules.names()}
    assert exists["easy_dualpipe"] == {(p, m) for p, m in SIZES if p % 2 == 0 and m % 2 == 0}
    assert exists["dualpipe"] == {(p, m) for p, m in SIZES if p % 2 == 0 and m % 2 == 0 and m >= 2 * p}
    assert exists["dualpipev"] == {(p, m) for p, m in SIZES if m >= 2 * p}


def test_refusals_name_the_rule_the_values_and_the_remedy(subtests):
    for name, p, m, message in [
        ("dualpipe", 5, 20, r"dualpipe needs an even number of ranks, got 5: .*; use dualpipev or 4 or 6 ranks"),
        ("dualpipe", 1, 20, r"use dualpipev or 2 ranks$"),
        ("dualpipe", 8, 19, r"dualpipe needs an even number of microbatches, .* got 19; use 18 or 20"),
        ("dualpipe", 8, 15, r"two microbatches per rank, got 15 for 8 ranks; use easy_dualpipe or 16 microbatches"),
        ("dualpipe", 8, 14, r"two microbatches per rank, got 14 for 8 ranks; use easy_dualpipe or 16 microbatches"),
        ("dualpipev", 4, 7, r"two microbatches per rank, got 7 for 4 ranks; use 8 microbatches or more"),
        ("easy_dualpipe", 3, 4, r"easy_dualpipe needs an even number of ranks, got 3: .*; use 2 or 4 ranks"),
        ("easy_dualpipe", 4, 5, r"an even number of microbatches, half for each direction, got 5; use 4 or 6$"),
        ("easy_dualpipe", 1, 4, r"even number of ranks, got 1: .*; use 2 ranks$"),
    ]:
        with subtests.test(name=name, p=p, m=m, message=message), pytest.raises(ValueError, match=message):
            schedules.build(name, p, m)


def test_the_eight_steps_of_the_published_figure():
    steps = eight_steps(position=3, num_positions=4, num_microbatches=10)
    assert " ".join(steps[3]).startswith("F0 B1 F1&B0 F0&B1 F1&B0")  # the middle rank's first pair stands apart
    assert [len(step) for step in eight_steps(0, 4, 10)] == [6, 2, 9, 6, 6, 2, 6, 1]


@pytest.mark.parametrize(("p", "rows"), [(4, ["0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1", "1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1"])])
def test_easy_dualpipe_by_hand(p, rows):
    found = schedules.easy_dualpipe(p, p).rows()
    assert found[: p // 2] == rows
    swap = Program.parse("mirrored", found[::-1])
    turned = [[a._replace(microbatch=(a.microbatch + p // 2) % p) for a in steps] for steps in swap.ranks]
    assert Program("mirrored", turned) == schedules.easy_dualpipe(p, p)


def test_each_direction_of_easy_dualpipe_alone_is_1f1b(subtests):
    for p, m in [(2, 2), (4, 2), (4, 4), (6, 6), (8, 4), (8, 8), (16, 12)]:
        with subtests.test(p=p, m=m):
            program = schedules.easy_dualpipe(p, m)
            downwards = [tuple(a for a in steps if a.microbatch < m // 2) for steps in program.ranks]
            assert tuple(downwards) == schedules.one_f_one_b(p, m // 2).ranks
