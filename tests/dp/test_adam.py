"""AdamW by hand against torch and the oracle; a shard against the whole, bitwise."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import rounding
from torch import nn

from dualpipe_lab.dp.adam import AdamW, OptimizerShard
from dualpipe_lab.dp.layout import Layout

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "adam.json").read_text())
HYPER = {key: tuple(value) if key == "betas" else value for key, value in ORACLE["hyper"].items()}


def run(hyper, steps, clip=None):
    """The weights and moments after some steps of the oracle's gradients."""
    weight = nn.Parameter(torch.tensor(ORACLE["p0"], dtype=torch.float64))
    optimizer = AdamW([weight], **hyper)
    for grad in ORACLE["grads"][:steps]:
        weight.grad = torch.tensor(grad, dtype=torch.float64)
        if clip:
            weight.grad *= min(1.0, clip / (float(weight.grad.norm()) + 1e-6))
        optimizer.step()
    return {"p": weight.detach(), "m": optimizer.state[weight]["exp_avg"], "v": optimizer.state[weight]["exp_avg_sq"]}


@pytest.mark.parametrize(
    ("case", "changes", "clip"),
    [
        ("adamw", {}, None),
        ("adam_wd0", {"weight_decay": 0.0}, None),
        ("adam_wd0_eps0.01", {"weight_decay": 0.0, "eps": 0.01}, None),
        ("adamw_clip0.5", {}, 0.5),
    ],
)
def test_it_equals_the_oracle(case, changes, clip):
    hyper = {**HYPER, **changes}
    for steps, expected in ORACLE["cases"][case].items():
        if steps.isdigit():
            found = run(hyper, int(steps), clip)
            for name, values in expected.items():
                expected_values = torch.tensor(values, dtype=torch.float64)
                # in a step each number is rounded about six times; the weights are the largest
                limit = rounding(torch.float64, 6 * int(steps), max(1.0, float(expected_values.abs().max())))
                assert (found[name] - expected_values).abs().max() <= limit, (steps, name)


def test_a_weight_without_a_gradient_from_the_data_still_decays():
    column = [row[5] for row in ORACLE["grads"]]
    assert column == [0] * 10
    assert float(run(HYPER, 10)["p"][5]) == pytest.approx(
        1.9375 * (1 - 0.01 * 0.1) ** 10, rel=rounding(torch.float64, 10)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_equals_torch(dtype):
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 35, dtype=dtype).view(7, 5)) for _ in range(2))
    optimizers = (
        AdamW([ours], lr=0.01, weight_decay=0.1),
        torch.optim.AdamW([theirs], 0.01, weight_decay=0.1),
    )
    for step in range(10):
        grad = torch.randn(7, 5, dtype=dtype)
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = None if step == 4 else grad.clone()  # a step without a gradient counts for neither weight
            if step != 4:
                optimizer.step()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=40)
@given(numel=st.integers(1, 70), num_shards=st.integers(1, 9), seed=st.integers(0, 99))
def test_shards_are_bitwise_the_whole(dtype, numel, num_shards, seed):
    generator = torch.Generator().manual_seed(seed)
    layout = Layout([numel], num_shards)
    padded = torch.zeros(layout.padded_numel, dtype=dtype)
    padded[:numel] = torch.randn(numel, generator=generator, dtype=dtype)
    whole = nn.Parameter(padded[:numel].clone())
    optimizer = AdamW([whole], **HYPER)
    shards = [OptimizerShard(part, **HYPER) for part in padded.split(layout.shard_numel)]
    for _ in range(3):
        grad = torch.zeros(layout.padded_numel, dtype=dtype)
        grad[:numel] = torch.randn(numel, generator=generator, dtype=dtype)
        whole.grad = grad[:numel].clone()
        optimizer.step()
        for shard, part in zip(shards, grad.split(layout.shard_numel), strict=True):
            shard.step(part)
    assert torch.equal(padded[:numel], whole.detach())
    assert not padded[numel:].any()  # padding stays zero


def test_a_shard_with_a_master_copy_moves_where_bf16_stands_still():
    demo = ORACLE["master_weight_demo"]
    with_master = OptimizerShard(torch.ones(1, dtype=torch.bfloat16), lr=1e-3, weight_decay=0, master=True)
    without = OptimizerShard(torch.ones(1, dtype=torch.bfloat16), lr=1e-3, weight_decay=0)
    seen = []
    for _ in range(demo["steps"]):
        grad = torch.ones(1, dtype=torch.bfloat16)
        with_master.step(grad)
        without.step(grad)
        seen.append(float(with_master.working))
    assert float(without.working) == 1.0  # 1e-3 is less than half the spacing of bf16 below 1
    assert float(with_master.weight) == pytest.approx(0.98, abs=1e-6)
    assert seen == [float(torch.tensor(1 - 1e-3 * step).bfloat16()) for step in range(1, 21)]
    assert set(with_master.state_dict()) == {"parameter", "exp_avg", "exp_avg_sq"}


def test_rounding_to_bf16_is_to_nearest_even():
    for exact, rounded in ORACLE["bf16_rne"]:
        shard = OptimizerShard(torch.zeros(1, dtype=torch.bfloat16), master=True)
        shard.weight.fill_(exact)
        shard.round()
        assert float(shard.working) == pytest.approx(rounded, rel=1e-7)


def test_scale():
    shards = [OptimizerShard(torch.ones(2, dtype=torch.float64), lr=0.5e-3, weight_decay=0) for _ in range(2)]
    shards[0].step(torch.full((2,), 8.0, dtype=torch.float64), 0.25)
    shards[1].step(torch.full((2,), 2.0, dtype=torch.float64))
    assert torch.equal(shards[0].working, shards[1].working)
    assert float(shards[0].working[0]) == pytest.approx(1 - 0.5e-3)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match=r"betas in \[0, 1\), and finite lr, eps and weight_decay of at least 0"):
        AdamW([nn.Parameter(torch.ones(1))], betas=(0.9, 1.0))
    for name in ("lr", "eps", "weight_decay"):
        for number in (-1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match="finite lr, eps and weight_decay of at least 0"):
                AdamW([nn.Parameter(torch.ones(1))], **{name: number})
    with pytest.raises(ValueError, match="nothing to update"):
        AdamW([nn.Parameter(torch.ones(1), requires_grad=False)])
    with pytest.raises(ValueError, match="own master copy"):
        OptimizerShard(torch.ones(1), master=True)


def test_optimizer_drops_gradients():
    weight = nn.Parameter(torch.ones(1))
    optimizer = AdamW([weight])
    weight.grad = torch.ones(1)
    optimizer.zero_grad()
    optimizer.step()
    assert weight.grad is None
    assert weight.item() == 1.0
