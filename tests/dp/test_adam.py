"""AdamW by hand against torch; a shard against the whole, bitwise; master copies, and rounding at random."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dualpipe_lab.dp import adam
from dualpipe_lab.dp.adam import AdamW, OptimizerShard, stochastic_round
from dualpipe_lab.dp.layout import Layout

HYPER = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("hyper", [{}, HYPER, HYPER | {"weight_decay": 0.0}], ids=["default", "all", "no decay"])
def test_it_equals_torch(dtype, hyper, monkeypatch):
    """To the bit, weights and moments; in blocks of rows; one column has gradients of 0, and decays."""
    monkeypatch.setattr(adam, "_BLOCK", 3)
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 35, dtype=dtype).view(7, 5)) for _ in range(2))
    optimizers = AdamW([ours], **hyper), torch.optim.AdamW([theirs], **hyper, foreach=False)
    for step in range(10):
        grad = torch.randn(7, 5, dtype=dtype)
        grad[:, 2] = 0
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            assert weight.grad is None
            if step != 4:  # a step without a gradient counts for neither weight
                weight.grad = grad.clone()
            optimizer.step()
        assert torch.equal(ours, theirs)
        states = optimizers[0].state[ours], optimizers[1].state[theirs]
        assert all(torch.equal(*(one[name] for one in states)) for name in ("exp_avg", "exp_avg_sq"))


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
            shard.step(part * 4, 0.25)
    assert torch.equal(padded[:numel], whole.detach())
    assert not padded[numel:].any()  # padding stays zero


def test_a_shard_with_a_master_copy_moves_where_bf16_stands_still():
    with_master = OptimizerShard(torch.ones(1, dtype=torch.bfloat16), lr=1e-3, weight_decay=0, master=True)
    without = OptimizerShard(torch.ones(1, dtype=torch.bfloat16), lr=1e-3, weight_decay=0)
    seen = []
    for _ in range(20):
        grad = torch.ones(1, dtype=torch.bfloat16)
        with_master.step(grad)
        without.step(grad)
        seen.append(float(with_master.working))
    assert float(without.working) == 1.0  # 1e-3 is less than half the spacing of bf16 below 1
    assert float(with_master.weight) == pytest.approx(0.98, abs=1e-6)
    assert seen == [float(torch.tensor(1 - 1e-3 * step).bfloat16()) for step in range(1, 21)]
    assert set(with_master.state_dict()) == {"parameter", "exp_avg", "exp_avg_sq"}


def test_rounding_at_random_is_right_on_average_and_moves_where_bf16_stands_still():
    generator = torch.Generator().manual_seed(0)
    x = torch.full((100_000,), 1.001)
    rounded = stochastic_round(x, generator)
    assert sorted(set(rounded.tolist())) == [1.0, 1.0078125]
    assert rounded.float().mean().item() == pytest.approx(1.001, abs=5e-5)
    exact = torch.tensor([0.0, -2.5, float("inf"), -float("inf")])
    assert torch.equal(stochastic_round(exact, generator).float(), exact)
    assert stochastic_round(torch.tensor([float("nan")]), generator).isnan().all()
    shard = OptimizerShard(torch.ones(1000, dtype=torch.bfloat16), lr=1e-3, weight_decay=0, generator=generator)
    for _ in range(20):
        shard.step(torch.ones(1000, dtype=torch.bfloat16))
    assert shard.working.float().mean().item() == pytest.approx(0.98, abs=1e-3)
    assert shard.state["exp_avg"].dtype == torch.float32


RANGES = r"betas in \[0, 1\), and finite lr, eps and weight_decay of at least 0"
REFUSED = [
    (r"eps=1e-08 is 0 in torch\.float16", lambda weight: AdamW([nn.Parameter(weight.detach().half())])),
    (r"master=True .* or use eps=1e-4", lambda weight: adam.adamw_(*[weight.detach().half() for _ in range(4)], 1)),
    *((RANGES, lambda weight, bad=bad: AdamW([weight], betas=bad)) for bad in ((0.9, 1.0), (-0.1, 0.9))),
    *(
        (RANGES, lambda weight, name=name, bad=bad: AdamW([weight], **{name: bad}))
        for name in ("lr", "eps", "weight_decay")
        for bad in (-1.0, math.nan, math.inf)
    ),
    ("nothing to update", lambda weight: AdamW([weight.requires_grad_(False)])),
    ("own master copy", lambda weight: OptimizerShard(weight.detach(), master=True)),
    (
        r"for bf16 weights without a master copy, got torch\.float32",
        lambda weight: OptimizerShard(weight.detach(), generator=torch.Generator()),
    ),
]


def test_bad_numbers_and_types_are_refused():
    for message, call in REFUSED:
        with pytest.raises(ValueError, match=message):
            call(nn.Parameter(torch.ones(1)))
