"""All ranks step or none does: NaN in one element on one rank, any norm, any optimizer; and one scaler decides once."""

import math

import pytest
import torch
from declared_model import KINDS, build, local, mesh_of
from models import launch, make_batch
from torch import nn
from zero_runs import STAGES, Blocks
from zero_runs import build as build_blocks

from dualpipe_lab.dp.grad_norm import global_norm
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import full_weights

AXES = [("pp", 2), ("dp", 2)]
NORMS = (2.0, math.inf)


def set_gradients(optimizer, mesh, bad):
    """Gradients that are summed already, with `bad` in one element of the last stage: in one shard, or all copies."""
    gradients = optimizer.finished_gradients()
    for shard, grad in zip(optimizer.local_shards, gradients, strict=True):
        first = shard.bucket.parameters[0]
        grad.copy_(local(optimizer.spec.parameters[first], "gradient").reshape(-1)[:1].expand_as(grad))
    if mesh.rank("pp") == 1 and mesh.rank("dp") in ((1,) if optimizer.is_sharded else (0, 1)):
        gradients[-1][0] = bad


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_one_bad_element_stops_every_rank(bad):
    """pp 2 x dp 2 on a mesh: only one stage's shard on one data rank has it, and every other rank learns it."""

    def fn(rank, world_size):
        found, mesh = [], mesh_of(AXES)
        for kind in KINDS.keys() - {"Zero1 over dp"}:
            _, optimizer = build(kind, mesh)
            before = {name: weight.clone() for name, weight in full_weights(optimizer).items()}
            ways = [{"max_norm": 1.0, "norm_type": norm_type} for norm_type in NORMS]
            for way in (*ways, {"scaler": LossScaler(4.0)}):
                optimizer.zero_grad()
                set_gradients(optimizer, mesh, bad)
                report = optimizer.step(**way)
                after = full_weights(optimizer)
                same = all(torch.equal(before[name], after[name]) for name in before)
                scale = way["scaler"].scale if "scaler" in way else 2.0
                is_finite = report.norm is not None and math.isfinite(report.norm)
                found.append((report.stepped, is_finite, same, optimizer.num_steps, scale))
            optimizer.zero_grad()
            set_gradients(optimizer, mesh, 1.0)
            assert optimizer.step(max_norm=1.0, norm_type=math.inf).stepped
        return found

    for found in launch(fn, 4, timeout=400):
        assert len(found) == 12
        assert set(found) == {(False, False, True, 0, 2.0)}, found


def test_the_largest_element_is_not_lost_on_any_rank():
    """GLOO's maximum keeps a NaN of the first rank and loses that of the others."""

    def fn(rank, world_size):
        found = []
        for bad in range(world_size):
            grad = torch.tensor([1.0, math.nan if rank == bad else 2.0])
            found += [global_norm([(grad, {"x"})], {"x": None}, p) for p in NORMS]
        return found

    for found in launch(fn, 3):
        assert not any(map(math.isfinite, found))


CASES = [  # factor of the last rank's loss, norm that is given, whether there is a scaler; whether all step, the norm
    (math.nan, None, False, False, math.nan),
    (1e30, None, False, False, math.inf),  # whose square is more than fp32 holds
    (1e30, None, True, False, math.inf),
    (1.0, math.nan, False, False, math.nan),
    (1.0, 7.0, False, True, 7.0),
]


def test_no_rank_steps_when_the_norm_is_not_finite_whoever_has_computed_it():
    """A norm may come from outside; a scaler backs off also where the norm alone overflows."""

    def fn(rank, world_size):
        found, (tokens, targets) = [], make_batch(rows=6)
        for stage in STAGES:
            for factor, norm, with_scaler, *_ in CASES:
                model = Blocks(torch.float32)
                optimizer, scaler = build_blocks(stage, model, {}), LossScaler(4.0) if with_scaler else None
                before = full_weights(optimizer)
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                (loss * (factor if rank == world_size - 1 else 1.0)).backward()
                report = optimizer.step(max_norm=1.0, norm=norm, scaler=scaler)
                after = full_weights(optimizer)
                moved = any(not torch.equal(before[name], after[name]) for name in before)
                found.append((report, moved, optimizer.num_steps, scaler.scale if scaler else 2.0))
        return found

    for found in launch(fn, 2):
        for (report, *rest), (*_, steps, norm) in zip(found, CASES * len(STAGES), strict=True):
            assert rest == [steps, int(steps), 2.0]
            assert report.stepped == steps
            assert report.norm == pytest.approx(norm, nan_ok=True)


def test_a_scaler_belongs_to_one_optimizer():
    """Two would update it twice in a step, and the second would unscale by the next step's scale."""

    def fn(rank, world_size):
        scaler, (tokens, targets), texts = LossScaler(4.0, interval=1), make_batch(rows=6), []
        for stage in STAGES:
            models = [Blocks(torch.float32), Blocks(torch.float32)]
            optimizers = [build_blocks(stage, model, {}) for model in models]
            for model in models:
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                scaler.scaled(loss).backward()
            assert optimizers[0].step(scaler=scaler).stepped
            scale, before = scaler.scale, full_weights(optimizers[1])
            with pytest.raises(ValueError, match="a loss scaler belongs to one optimizer") as caught:
                optimizers[1].step(scaler=scaler)
            after = full_weights(optimizers[1])
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert scaler.scale == scale
            texts.append(str(caught.value))
            del optimizers, model, models, caught
        return texts, scaler.scale

    for texts, scale in launch(fn, 2):
        assert all("give one optimizer the full model, with a Mesh" in text for text in texts)
        assert scale == 64.0  # four optimizers, one after the other, and one step of each
