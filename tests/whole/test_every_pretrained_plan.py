"""The plans that `make bench LONG=1` compares with transformers: which they are, and that a wrong number is seen.

`test_pretrained.py` and `test_pretrained_v3.py` draw plans of their own.
"""

import sys
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from published import PLANNED

import dualpipe_lab as lab

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _pretrained_proof as proof


@pytest.fixture(scope="module")
def every():
    return list(proof.cases())


@pytest.mark.parametrize("family", PLANNED)
def test_every_size_that_divides_is_there_once_and_every_schedule(every, family):
    options = PLANNED[family]
    heads, experts = options["num_attention_heads"], options.get("n_routed_experts") or options.get("num_experts", 1)
    grids = {
        sizes
        for sizes in product(range(1, 9), repeat=4)
        if prod(sizes) <= 8 and heads % sizes[0] == 0 and experts % sizes[2] == 0
    }
    found = [case.plan for case in every if case.family == family]
    assert sorted((plan.tp, plan.cp, plan.ep, plan.pp) for plan in found) == sorted(grids)
    assert {plan.schedule for plan in found if plan.pp > 1} == set(lab.schedules.names(synchronous=True))
    assert {plan.layout for plan in found if plan.cp > 1} == set(lab.cp.LAYOUTS)
    for flag in ("sequence_parallel", "recompute", "loss_chunk"):
        assert {bool(getattr(plan, flag)) for plan in found} == {False, True}


def test_the_lines_of_two_plans_differ(every):
    assert len(set(map(str, every))) == len(every) > 100
    assert any(case.plan.overlap for case in every)


def test_a_plan_is_right_and_one_wrong_number_in_its_reference_is_seen(every, tmp_path):
    drawn = [case for case in every if case.plan.tp == case.plan.pp == 2 and case.plan.world_size == 4]
    case = next(case for case in drawn if case.family == "DeepSeek-V3")
    right = proof.references(tmp_path)([case])[case.key]
    gradients = {name: value.clone() for name, value in right.gradients.items()}
    gradients["norm.weight"][0] += 1e-6 * max(float(value.abs().max()) for value in gradients.values())
    logits = right.logits.clone()
    logits[-1, -1, -1] += 1e-6 * logits.abs().max()
    wrong = {
        "nothing": right,
        "gradients": right._replace(gradients=gradients),
        "logits": right._replace(logits=logits),
        "loss": right._replace(loss=right.loss * (1 + 1e-6)),
        "a name": right._replace(gradients=right.gradients | {"another": torch.zeros(1)}),
        "a row": right._replace(logits=torch.cat((right.logits, right.logits[:1]))),
    }
    found = lab.launch(prove_each, 4, case, list(wrong.values()), output="collect", timeout=300)[0]
    assert dict(zip(wrong, map(proof.problems, found), strict=True)) == {
        "nothing": [],
        "gradients": ["gradients off by 1.0e-06"],
        "logits": ["logits off by 1.0e-06"],
        "loss": ["loss off by 1.0e-06"],
        "a name": ["gradients off by inf"],
        "a row": ["logits off by inf"],
    }


def prove_each(rank, world_size, case, references):
    return [proof.prove_all(rank, world_size, [case], {case.key: right})[0] for right in references]
