"""Drawn plans of 8 ranks, and one of 16 with all five axes: gradients, loss, norm, weights and calls of one process.

`make bench LONG=1` trains under every plan of 8 ranks in the same way.
"""

import random
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import dualpipe_lab as lab

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _proof

SYNCHRONOUS = set(lab.schedules.names(synchronous=True))
FIVE_AXES = lab.Plan(
    pp=2, dp=2, cp=2, tp=2, ep=2, experts_in_data=True, num_microbatches=2, schedule="easy_dualpipe", zero=2,
    sequence_parallel=True, precision="float64",
)  # fmt: skip


def drawn():
    """27 plans: one for every schedule, with few stages, and nine without a pipeline, of every stage of ZeRO.

    The last three are overlapped experts under ZeRO-3, two of them on DualPipe with 2 and 4 ranks of pp.
    """
    draw, by_schedule, alone, in_pieces = random.Random(20), defaultdict(list), defaultdict(list), defaultdict(list)
    for case in _proof.cases():
        plan = case.plan
        if plan.zero == 3 and plan.overlap:
            in_pieces[plan.schedule == "dualpipe", plan.pp].append(case)
        elif plan.pp in (2, 4):
            by_schedule[plan.schedule, case.model].append(case)
        elif plan.pp == 1:
            alone[plan.zero].append(case)
    chosen = [
        draw.choice(by_schedule[name, ("llama", "v3")[number % 2]]) for number, name in enumerate(sorted(SYNCHRONOUS))
    ]
    for number in range(9):
        chosen.append(draw.choice([case for case in alone[number % 4] if case not in chosen]))
    return chosen + [draw.choice(in_pieces[kind]) for kind in ((True, 2), (True, 4), (False, 2))]


def test_drawn_plans_train_as_in_one_process(some):
    chosen = drawn()
    plans = [case.plan for case in chosen]
    assert len(set(map(str, chosen))) >= 27
    assert {plan.schedule for plan in plans if plan.pp > 1} == SYNCHRONOUS
    assert {plan.zero for plan in plans if plan.pp > 1} == {0, 1, 2, 3}
    for axis in ("pp", "dp", "cp", "tp", "ep"):
        assert sum(getattr(plan, axis) > 1 for plan in plans) >= 3, f"{axis} is drawn too seldom"
    assert {plan.has_ep_axis for plan in plans if plan.ep > 1} == {False, True}
    for flag in ("sequence_parallel", "recompute", "overlap"):
        assert {getattr(plan, flag) for plan in plans} == {False, True}
    assert_right(some(chosen, 3))


def test_a_plan_of_16_ranks_with_all_five_axes_trains_as_in_one_process():
    assert FIVE_AXES.world_size == 16
    assert_right([_proof.Case("v3", FIVE_AXES)])


def test_a_wrong_gradient_would_be_seen():
    """The reference with one number changed by a millionth of the largest is beyond every limit of the gradients."""
    case = _proof.Case("llama", lab.Plan(num_microbatches=2, precision="float64"))
    key, right = next(iter(_proof.references([case]).items()))
    changed = [{name: tensor.clone() for name, tensor in step.items()} for step in right.gradients]
    largest = max(float(tensor.abs().max()) for tensor in changed[1].values())
    changed[1]["norm.weight"][0] += 1e-6 * largest
    wrong = replace(right, gradients=changed)
    found = lab.launch(_proof.prove_all, 1, [case], {key: wrong}, timeout=300, output="collect")[0]
    assert _proof.problems(found[0]) == ["gradients off by 1.0e-06"]


def assert_right(chosen):
    """Train under each plan in one launch, and compare."""
    world_size, right = chosen[0].plan.world_size, _proof.references(chosen)
    found = lab.launch(_proof.prove_all, world_size, chosen, right, timeout=900, output="collect")[0]
    assert len(found) == len(chosen)
    wrong = {str(case): bad for case, errors in zip(chosen, found, strict=True) if (bad := _proof.problems(errors))}
    assert not wrong
    assert all(errors["traffic"] is True for errors in found)
