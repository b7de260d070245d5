"""The plans that `make bench LONG=1` compares with transformers: one of them, and that a wrong number is seen.

`test_pretrained.py` draws plans of its own.
"""

import sys
from pathlib import Path

import pytest
import torch

import dualpipe_lab as lab

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _pretrained_proof as proof


@pytest.fixture(scope="module")
def every():
    return list(proof.cases())


def test_a_plan_is_right_and_one_wrong_number_in_its_reference_is_seen(every, tmp_path):
    drawn = [case for case in every if case.plan.tp == case.plan.pp == 2 and case.plan.world_size == 4]
    case = next(case for case in drawn if case.family == "DeepSeek-V3")
    right = proof.references(tmp_path)([case])[case.key]
    gradients = {name: value.clone() for name, value in right.gradients.items()}
    gradients["norm.weight"][0] += 1e-6 * max(float(value.abs().max()) for value in gradients.values())
    logits = right.logits.clone()
    logits[-1, -1, -1] += 1e-6 * logits.abs().max()
    numbers = right._replace(gradients=gradients, logits=logits, loss=right.loss * (1 + 1e-6))
    more = right.gradients | {"another": torch.zeros(1)}, torch.cat((right.logits, right.logits[:1]))
    names = right._replace(gradients=more[0], logits=more[1])
    found = lab.launch(prove_each, 4, case, [right, numbers, names], output="collect", timeout=300)[0]
    assert [set(proof.problems(one)) for one in found] == [
        set(),
        {f"{what} off by 1.0e-06" for what in ("gradients", "logits", "loss")},
        {"gradients off by inf", "logits off by inf"},
    ]


def prove_each(rank, world_size, case, references):
    return [proof.prove_all(rank, world_size, [case], {case.key: right})[0] for right in references]
