"""A step whose norm is not finite is left out on every rank; arguments in the wrong order are explained."""

import math

import pytest
import torch
from models import launch, make_batch
from torch import nn
from zero_runs import STAGES, Blocks, build

from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import full_weights
from dualpipe_lab.dp.zero3 import Zero3


def step(stage, factor, norm=None, with_scaler=False):
    """A step in which the loss of the last rank is multiplied by `factor`: did weights move, and what does it say?"""

    def fn(rank, world_size):
        model = Blocks(torch.float32)
        optimizer, (tokens, targets) = build(stage, model, {}), make_batch(rows=6)
        before = full_weights(optimizer)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        (loss * (factor if rank == world_size - 1 else 1.0)).backward()
        scaler = LossScaler(4.0) if with_scaler else None
        report = optimizer.step(max_norm=1.0, norm=norm, scaler=scaler)
        after = full_weights(optimizer)
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        return report, moved, scaler.scale if scaler else None, optimizer.num_steps

    return launch(fn, 2)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("factor", [math.nan, 1e30])  # whose square is more than fp32 holds
def test_no_rank_steps_when_the_norm_is_not_finite(stage, factor):
    for report, moved, _, num_steps in step(stage, factor):
        assert (report.stepped, moved, num_steps) == (False, False, 0)
        assert not math.isfinite(report.norm)


@pytest.mark.parametrize("stage", STAGES)
def test_a_scaler_backs_off_when_only_the_norm_overflows(stage):
    for report, moved, scale, _ in step(stage, 1e30, with_scaler=True):
        assert (report.stepped, report.norm, moved, scale) == (False, math.inf, False, 2.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_of_the_whole_model_may_come_from_outside(stage):
    for report, moved, _, _ in step(stage, 1.0, norm=7.0):
        assert (report, moved) == (type(report)(True, 7.0), True)
    for report, moved, _, _ in step(stage, 1.0, norm=math.nan):
        assert not report.stepped
        assert not moved


def test_units_that_are_none_are_explained():
    def fn(rank, world_size):
        layer, found = nn.Linear(2, 2), []
        for given in (torch.distributed.group.WORLD, [None], layer):
            with pytest.raises(TypeError) as caught:
                Zero3(layer, units=given)
            found.append(str(caught.value))
        with pytest.raises(TypeError) as caught:
            Zero3(layer, [layer])
        return [*found, str(caught.value)]

    *units, mesh = launch(fn, 2)[0]
    assert all("takes a list of modules, units=[block, ...], got " in one for one in units)
    assert "mesh is a Mesh, a group of ranks or None, got list" in mesh
