"""Loss scaling against torch step by step, the decision that ranks share, and training in 16 bits."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import launch
from torch import nn
from zero_runs import BATCHES, STAGES, Blocks, build

from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import full_weights


@settings(max_examples=30)
@given(
    st.lists(st.booleans(), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from([2.0**100, 1024.0, 3.0]),
    st.sampled_from([(2.0, 0.5), (4.0, 0.25)]),
)
def test_scales_equal_torch_step_by_step(overflows, interval, scale, factors):
    growth, backoff = factors
    ours = LossScaler(scale, interval=interval, growth=growth, backoff=backoff)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=scale, growth_interval=interval, growth_factor=growth, backoff_factor=backoff
    )
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


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match=r"growth > 1.* got scale=65536.0, growth=0.5"):
        LossScaler(growth=0.5)
