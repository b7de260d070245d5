"""Loss scaling against torch step by step, the decision that ranks share, and rounding at random."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import launch
from torch import nn
from zero_runs import BATCHES, STAGES, Blocks, build

from dualpipe_lab.dp.adam import OptimizerShard, stochastic_round
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import full_weights

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "adam.json").read_text())["grad_scaler"]


def test_scales_follow_the_oracle():
    scaler = LossScaler(
        ORACLE["init"], growth=ORACLE["growth"], backoff=ORACLE["backoff"], interval=ORACLE["growth_interval"]
    )
    for row in ORACLE["log"]:
        assert scaler.scale == row["scale_used"]
        scaler.update(row["found_inf"])
        assert (scaler.scale, scaler.num_good_steps) == (row["scale_after"], row["good_after"])


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 4), st.sampled_from([2.0**100, 1024.0, 3.0]))
def test_scales_equal_torch_step_by_step(overflows, interval, scale):
    ours = LossScaler(scale, interval=interval)
    theirs = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    for overflow in overflows:
        weight.grad = None
        theirs.scale(weight.sum()).backward()
        weight.grad.fill_(float("inf") if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        assert ours.scale == theirs.get_scale()
        assert ours.num_good_steps == theirs.state_dict()["_growth_tracker"]
    again = LossScaler()
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert again.state_dict() == ours.state_dict()


def test_the_scale_never_becomes_infinite():
    scaler = LossScaler(1e308, growth=1e10, interval=1)
    scaler.update(False)
    assert scaler.scale == 1e308


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_skip_when_one_overflows_and_scaling_changes_nothing_else(num_ranks):
    """fp64 and a power of two: weights equal the unscaled run bitwise, clipping included."""

    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            optimizers = [build(stage, Blocks(), {"lr": 0.01}) for _ in range(2)]
            scaler, log = LossScaler(1024.0, interval=2), []
            for number, (tokens, _) in enumerate([*BATCHES, BATCHES[0]]):
                for optimizer, used in zip(optimizers, (scaler, None), strict=True):
                    overflow = used and number == 1 and rank == world_size - 1
                    factor = float("inf") if overflow else 1.0
                    optimizer.zero_grad()
                    loss = optimizer.module(tokens).square().mean() * factor
                    (used.scaled(loss) if used else loss).backward()
                    if used:
                        before = full_weights(optimizer)
                        report = optimizer.step(max_norm=0.3, scaler=used)
                        moved = any(
                            not torch.equal(before[name], value) for name, value in full_weights(optimizer).items()
                        )
                        log.append((report.stepped, moved, optimizer.num_steps, used.scale))
                    elif number != 1:
                        norm = optimizer.step(max_norm=0.3).norm
                        log[-1] += (norm == report.norm,)
            ours, theirs = (full_weights(optimizer) for optimizer in optimizers)
            found.append((log, all(torch.equal(ours[name], theirs[name]) for name in ours)))
        return found

    for found in launch(fn, num_ranks):
        for log, same in found:
            assert log == [
                (True, True, 1, 1024.0, True),
                (False, False, 1, 512.0),
                (True, True, 2, 512.0, True),
                (True, True, 3, 1024.0, True),
            ]
            assert same


def test_sixteen_bit_training_with_masters_stays_close_to_fp32():
    def fn(rank, world_size):
        found = {}
        for stage in STAGES:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                scaler = LossScaler(256.0) if dtype == torch.float16 else None
                model = Blocks(torch.float32).to(dtype)
                optimizer = build(stage, model, {"lr": 1e-4, "master": dtype != torch.float32})
                for _ in range(20):
                    optimizer.zero_grad()
                    loss = model(BATCHES[0][0]).float().square().mean()
                    (scaler.scaled(loss) if scaler else loss).backward()
                    optimizer.step(scaler=scaler)
                masters = [held.optimizer.weight.dtype == torch.float32 for held in optimizer.local_shards]
                found[stage.__name__, dtype] = full_weights(optimizer)["blocks.0.0.weight"].float(), all(masters)
        return found

    (found, _) = launch(fn, 2)
    start = Blocks(torch.float32).blocks[0][0].weight.detach()
    for (stage, dtype), (weight, masters) in found.items():
        assert masters
        exact = found[stage, torch.float32][0]
        rounding = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
        assert (weight - exact).abs().max() <= 2e-4 + rounding * exact.abs().max()
        assert (weight - start).abs().max() > 5e-4


def test_rounding_at_random_is_right_on_average_and_moves_where_bf16_stands_still():
    generator = torch.Generator().manual_seed(0)
    x = torch.full((100_000,), 1.001)
    rounded = stochastic_round(x, generator)
    assert sorted(set(rounded.tolist())) == [1.0, 1.0078125]
    assert rounded.float().mean().item() == pytest.approx(1.001, abs=5e-5)
    exact = torch.tensor([0.0, -2.5, 1e30, float("inf"), -float("inf")])
    assert torch.equal(stochastic_round(exact[[0, 1, 3, 4]], generator).float(), exact[[0, 1, 3, 4]])
    assert stochastic_round(torch.tensor([float("nan")]), generator).isnan().all()
    shard = OptimizerShard(torch.ones(1000, dtype=torch.bfloat16), lr=1e-3, weight_decay=0, generator=generator)
    for _ in range(20):
        shard.step(torch.ones(1000, dtype=torch.bfloat16))
    assert shard.working.float().mean().item() == pytest.approx(0.98, abs=1e-3)
    assert shard.state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_round_alike_where_they_hold_the_same(num_ranks):
    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            optimizer = build(stage, Blocks(torch.bfloat16), {"lr": 1e-4, "rounding_seed": 5})
            for _ in range(5):
                optimizer.zero_grad()
                optimizer.module(BATCHES[0][0]).square().mean().backward()
                optimizer.step()
            found.append(full_weights(optimizer))
        return found

    out = launch(fn, num_ranks)
    start = Blocks(torch.bfloat16).state_dict()
    for found in out:
        for ours, theirs in zip(found, out[0], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
            assert not torch.equal(ours["embedding.weight"], start["embedding.weight"])


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match=r"growth > 1.* got scale=65536.0, growth=0.5"):
        LossScaler(growth=0.5)
    generator = torch.Generator()
    with pytest.raises(ValueError, match=r"for bf16 weights without a master copy, got torch\.float32"):
        OptimizerShard(torch.ones(1), generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert OptimizerShard(torch.ones(1, dtype=torch.bfloat16), master=True).weight.dtype == torch.float32
