"""Stages that add to the loss on both of their copies, and wrappers that a pipeline cannot have."""

import pytest
import torch
from runs import draw, launch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dualpipe_lab as lab
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime import PipelineRuntime, WithLoss

WIDTH, M, DP = 3, 4, 2


class Balanced(nn.Sequential):
    """Two linear layers, and a loss of the output between them."""

    def __init__(self, stage):
        torch.manual_seed(stage)
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.double()

    def forward(self, x):
        between = self[1](self[0](x))
        return WithLoss(self[2](between), (between**2).mean())


def one_process(xs, ys, number):
    """Gradients of the stages, and the loss of each of them on each microbatch."""
    stages, losses = [Balanced(stage) for stage in range(number)], []
    for x, y in zip(xs.flatten(0, 1), ys.flatten(0, 1), strict=True):
        added = []
        for stage in stages:
            x, loss = stage(x)
            added.append(loss / (DP * M))
        added[-1] = added[-1] + nn.functional.mse_loss(x, y) / (DP * M)
        sum(added).backward()
        losses.append([float(loss.detach()) for loss in added])
    return [{name: p.grad for name, p in stage.named_parameters()} for stage in stages], losses


def test_losses_of_both_copies_are_those_of_one_process():
    """Each microbatch's loss is in one of the copies; the runtime adds their gradients, then data parallelism."""
    xs, ys = draw(1, DP, M, 2, WIDTH), draw(2, DP, M, 2, WIDTH)

    def fn(rank, world_size):
        mesh, results = lab.Mesh(lab.Topology([("pp", 2), ("dp", DP)])), {}
        for name in ("dualpipe", "dualpipev"):
            for kind in (DDP, Zero1, Zero2):
                program = schedules.build(name, 2, M)
                mine = {action.stage: Balanced(action.stage) for action in program.actions(mesh.rank("pp"))}
                held = {i: kind(mine[i], mesh.group("dp"), bucket_bytes=60) for i in sorted(mine)}
                runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, group=mesh.group("pp"))
                here = mesh.rank("dp")
                found = runtime.step(list(xs[here]), list(ys[here]), [1 / (DP * M)] * M)
                last = program.num_stages - 1
                losses = {(last, m): float(loss) for m, loss in found.losses.items()}
                losses |= {key: float(loss) for key, loss in found.stage_losses.items()}
                results[name, kind.__name__] = {i: full_gradients(one) for i, one in held.items()}, losses, here
        return results

    references = {number: one_process(xs, ys, number) for number in (2, 4)}
    out = launch(fn, 4, timeout=400)
    for name, kind in out[0]:
        grads, losses = references[4 if name == "dualpipev" else 2]
        seen = []
        for results in out:
            found, own, here = results[name, kind]
            for index, ours in found.items():
                for key, value in grads[index].items():
                    assert (ours[key] - value).abs().max() <= 1e-12, (name, kind, index, key)
            for (stage, m), loss in own.items():
                seen.append((stage, here, m))
                assert abs(loss - losses[here * M + m][stage]) <= 1e-12, (name, stage, m)
        assert len(seen) == len(set(seen)) == len(grads) * DP * M, name  # every loss is on one rank


def test_torchs_ddp_around_a_stage_is_refused():
    """Without a refusal its ranks have different gradients, and nothing says so."""

    def fn(rank, world_size):
        program = schedules.build("1f1b", 1, M)
        wrapped = nn.Sequential(DistributedDataParallel(nn.Linear(WIDTH, WIDTH)))
        alone = lab.Mesh(lab.Topology([("pp", 1), ("dp", 2)])).group("pp")
        with pytest.raises(ValueError, match="stage 0 is wrapped in torch's DistributedDataParallel") as caught:
            PipelineRuntime(program, {0: wrapped}, nn.functional.mse_loss, group=alone)
        return str(caught.value)

    assert all("give the runtime the module itself, and sum its gradients with DDP" in text for text in launch(fn, 2))


def recomputed(layers, x):
    """Torch recomputes each layer with an engine of its own."""
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    x.sum().backward()


def by_hand(layers, x):
    """W of one layer at a time."""
    loss = layers(x).sum()
    for layer in layers:
        torch.autograd.backward(loss, inputs=list(layer.parameters()), retain_graph=True)


@pytest.mark.parametrize("backward", [recomputed, by_hand])
def test_one_microbatch_in_several_runs_of_the_engine_is_explained(backward):
    """Under ZeRO-2 without a pipeline."""

    def fn(rank, world_size):
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        optimizer = Zero2(layers, num_backwards=2, bucket_bytes=40)  # two microbatches
        with pytest.raises(ValueError, match="this is backward number 3 of the step, and num_backwards=2") as caught:
            backward(layers, torch.ones(2, WIDTH, requires_grad=True))
        return str(caught.value), optimizer.num_steps

    for text, _ in launch(fn, 2):
        assert "run the stages with a PipelineRuntime" in text
        assert "use_reentrant=False" in text
