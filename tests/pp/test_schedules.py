"""Orders of all schedules: torch's and DeepSeek's, what one has of another, the order of sums, and sizes refused."""

from itertools import product

import pytest
from schedule_grid import ORACLES, SIZES, legal, num_crossings
from torch.distributed.pipelining import schedules as torch_schedules

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import MESSAGE_KINDS, Action, B, F, Overlap, Program
from dualpipe_lab.pp.schedules.looped import round_sizes
from dualpipe_lab.pp.schedules.v_shapes import tick_by_tick
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import validate

VIRTUAL = (1, 2, 3)


def torch_rows(name, p, m, v=2):
    """One row of text per rank, without torch's constructors, which build messages too; None for sizes it refuses."""
    num_rounds = max(1, m // p)
    if name.startswith("Interleaved") and m % num_rounds:
        return None
    schedule = object.__new__(torch_schedules.get_schedule_class(name))
    schedule._stages, schedule.n_local_stages, schedule.num_stages = [None] * v, v, v * p
    schedule.pp_group_size, schedule._n_microbatches, schedule.microbatches_per_round = p, m, m // num_rounds
    orders = [schedule._calculate_single_rank_operations(rank) for rank in range(p)]
    return [" ".join(str(action) for action in order if action is not None) for order in orders]


@pytest.mark.parametrize(
    ("theirs", "ours", "virtual", "fewest"),
    [
        ("Interleaved1F1B", "interleaved", VIRTUAL, 0),
        ("InterleavedZeroBubble", "zero_bubble_h1", VIRTUAL, 0),
        ("ZBVZeroBubble", "zbv", (None,), 1),  # with fewer microbatches torch's leaves work out, as a test below shows
        ("DualPipeV", "dualpipev", (None,), 0),
    ],
)
def test_orders_are_torch_s_wherever_torch_is_legal(theirs, ours, virtual, fewest):
    for v in virtual:
        compared = 0
        for program in legal(ours, **({"num_virtual_stages": v} if v else {})):
            p, m = program.num_ranks, program.num_microbatches
            rows = torch_rows(theirs, p, m, v or 2) if m >= fewest * (2 * p - 1) else None
            assert rows is None or program.rows() == rows
            compared += rows is not None
        assert len(SIZES) > compared > 30


def test_breadth_first_is_torch_s_with_the_backwards_in_order_and_as_quick():
    cost = Cost(F=3, I=2, W=2, latency=2)
    for (p, m), v in product(SIZES, VIRTUAL):
        theirs = Program.parse("LIFO", torch_rows("LoopedBFS", p, m, v))
        turned = [[Action(s, k, m - 1 - i if k == B else i) for s, k, i in row] for row in theirs.ranks]
        ours = schedules.looped_bfs(p, m, v)
        assert ours == Program("FIFO", turned)
        here, there = simulate(ours, cost), simulate(theirs, cost)
        assert here.makespan == there.makespan
        assert [here.live_activations(rank) for rank in range(p)] == [there.live_activations(rank) for rank in range(p)]


@pytest.mark.parametrize(("name", "p", "m"), [("dualpipe", 8, 20), ("dualpipev", 4, 10), ("zbv", 4, 8)])
def test_the_published_program_action_by_action(name, p, m):
    (rows,) = (rows for title, rows in ORACLES.items() if title.startswith(f"{name} {p} ranks {m} microbatches"))
    assert schedules.build(name, p, m).rows() == rows


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


def test_each_direction_of_easy_dualpipe_alone_is_1f1b():
    for p, m in [(2, 2), (4, 2), (4, 4), (6, 6), (8, 4), (8, 8), (16, 12)]:
        program = schedules.easy_dualpipe(p, m)
        downwards = [tuple(a for a in steps if a.microbatch < m // 2) for steps in program.ranks]
        assert tuple(downwards) == schedules.one_f_one_b(p, m // 2).ranks


def test_rounds_are_full_wherever_they_can_be():
    for p, m in SIZES:
        sizes = round_sizes(p, m)
        assert sum(sizes) == m
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert sizes[-1] >= min(p, m)


def test_a_twin_with_pairs_keeps_its_schedule_s_order_of_forwards_and_of_backwards():
    assert schedules.paired_interleaved(4, 9, 1) == schedules.build("paired 1F1B", 4, 9)
    for (p, m), v in product(SIZES, VIRTUAL):
        twin, single = schedules.paired_interleaved(p, m, v), schedules.interleaved(p, m, v)
        for rank, theirs in enumerate(single.ranks):
            for kind in (F, B):
                assert [a for a in twin.actions(rank) if a.kind == kind] == [a for a in theirs if a.kind == kind]


def test_schedules_are_valid_plain_and_lowered_and_sum_gradients_in_order():
    for name in schedules.names():
        programs = list(legal(name, SIZES[::3]))
        assert len(programs) >= 3
        done = "BI" if name.startswith("paired") else "BW"  # a twin's B overtakes the W that it puts off
        for program in programs:
            lowered = validate(lower(validate(program)), blocking=True, in_order=True)
            kinds = [action.kind for action in lowered]
            assert [kinds.count(kind) for kind in MESSAGE_KINDS] == [num_crossings(program)] * 4
            sums = {}
            for action in (action for action in program if action.kind in done):
                home = action.stage, program.rank_of(action.stage, action.microbatch)
                sums.setdefault(home, []).append(action.microbatch)
            assert program.num_directions == 2 or all(row == sorted(row) for row in sums.values()), program


def test_every_size_of_the_grid_exists_or_is_refused_for_its_rule():
    exists = {name: {(p.num_ranks, p.num_microbatches) for p in legal(name)} for name in schedules.names()}
    assert exists.pop("easy_dualpipe") == {(p, m) for p, m in SIZES if p % 2 == 0 and m % 2 == 0}
    assert exists.pop("dualpipe") == {(p, m) for p, m in SIZES if p % 2 == 0 and m % 2 == 0 and m >= 2 * p}
    assert exists.pop("dualpipev") == {(p, m) for p, m in SIZES if m >= 2 * p}
    assert all(sizes == set(SIZES) for sizes in exists.values())


def test_schedules_are_found_by_name_however_it_is_written():
    assert schedules.names()[:2] == ["gpipe", "1f1b"]
    for name in ("1F1B", "1f1b", "one_f_one_b", "One F One B"):
        assert schedules.build(name, 3, 5) == schedules.one_f_one_b(3, 5)
    with pytest.raises(ValueError, match="no schedule named 'zigzag'; use one of gpipe, 1f1b"):
        schedules.build("zigzag", 2, 2)


def test_counts_that_no_schedule_has_are_refused(subtests):
    virtual = ("interleaved", "looped_bfs", "zero_bubble_h1", "paired_interleaved", "paired_zero_bubble_h1")
    sizes = [(0, 4), (4, 0), (-1, 4), (2.0, 4), (2, "8"), (True, 4)]
    cases = [(name, *size) for name in schedules.names() for size in sizes]
    cases += [(name, 2, 4, v) for name in virtual for v in (0, -1, 1.0, True)]
    for name, *arguments in cases:
        build = schedules.named(name).build
        message = f"{build.__name__} needs .* to be an integer of at least 1, got"
        with subtests.test(name=name, arguments=arguments), pytest.raises(ValueError, match=message):
            build(*arguments)


REFUSED = [
    ("dualpipe", (5, 20), r"dualpipe needs an even number of ranks, got 5: .*; use dualpipev or 4 or 6 ranks"),
    ("dualpipe", (1, 20), r"use dualpipev or 2 ranks$"),
    ("dualpipe", (8, 19), r"dualpipe needs an even number of microbatches, .* got 19; use 18 or 20"),
    ("dualpipe", (8, 15), r"two microbatches per rank, got 15 for 8 ranks; use easy_dualpipe or 16 microbatches"),
    ("dualpipe", (8, 14), r"two microbatches per rank, got 14 for 8 ranks; use easy_dualpipe or 16 microbatches"),
    ("dualpipev", (4, 7), r"two microbatches per rank, got 7 for 4 ranks; use 8 microbatches or more"),
    ("easy_dualpipe", (3, 4), r"easy_dualpipe needs an even number of ranks, got 3: .*; use 2 or 4 ranks"),
    ("easy_dualpipe", (4, 5), r"an even number of microbatches, half for each direction, got 5; use 4 or 6$"),
    ("easy_dualpipe", (1, 4), r"even number of ranks, got 1: .*; use 2 ranks$"),
    ("zero_bubble_h2", (4, 8, 3), r"at least the number of ranks, 4, got 3; use in_flight=4 \(which is ZB-H1\)"),
    ("interleaved", (4, 12, 2, 3), r"round_size to be at least the number of ranks, 4, got 3: .*use round_size=4"),
]


def test_refusals_name_the_rule_the_values_and_the_remedy(subtests):
    for name, arguments, message in REFUSED:
        with subtests.test(name=name, arguments=arguments), pytest.raises(ValueError, match=message):
            schedules.named(name).build(*arguments)


@pytest.mark.parametrize("interval", [0, 6])
def test_a_rule_that_lets_all_ranks_wait_is_refused(interval):
    """At once, after it has run out of picks, and where a later microbatch may still enter."""

    def forwards_alone(state, rank):
        return next(((F, stage) for stage in state.stages(rank) if state.can(F, stage)), None)

    for rule, left in ((lambda state, rank: None, 48), (forwards_alone, 32)):
        with pytest.raises(ValueError, match=rf"lets all 2 ranks wait forever: .* {left} are left .*state\.can"):
            tick_by_tick(2, 4, rule, interval)
