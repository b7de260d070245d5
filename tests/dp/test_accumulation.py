"""One update after several calls of a pipeline, by `num_backwards`: equal to one process under every optimizer."""

import pytest
import torch
from models import launch
from runs import Stages
from torch import nn
from zero_runs import STAGES

import dualpipe_lab as lab
from dualpipe_lab.dp import DDP, Zero1, Zero3, full_gradients

M, WIDTH = 4, 5  # microbatches of a call, features


def draw(number):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(number)]


def batch(seed):
    """Inputs and targets of one call: [data rank, microbatch, row, feature]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, M, 3, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]


def one_process(number, calls):
    stages = draw(number)
    for call in range(calls):
        for x, y in zip(*(part.flatten(0, 1) for part in batch(call)), strict=True):
            (nn.functional.mse_loss(nn.Sequential(*stages)(x), y) / (2 * M * calls)).backward()
    return {(index, name): p.grad for index, stage in enumerate(stages) for name, p in stage.named_parameters()}


def make(stage, program, mesh, num_backwards, **options):
    mine = {index: draw(program.num_stages)[index] for index, _ in {a[:2]: 0 for a in program.actions(mesh.rank("pp"))}}
    module = Stages(mine)
    units = {"units": list(mine.values())} if stage is Zero3 else {}
    optimizer = stage(module, mesh, **units, num_backwards=num_backwards, program=program) if stage else None
    runtime = lab.PipelineRuntime(program, mine, nn.functional.mse_loss, group=mesh.group("pp"), **options)
    return module, optimizer, runtime


def call(runtime, mesh, number, calls):
    xs, ys = (list(part[mesh.rank("dp")]) for part in batch(number))
    runtime.step(xs, ys, [1 / (M * calls)] * M)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "dualpipe", "dualpipev"])
def test_several_calls_of_a_pipeline_are_one_step(name):
    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("pp", 2), ("dp", 2)]))
        program, found = lab.schedules.build(name, 2, M), {}
        for stage in [None, *STAGES]:
            for calls in (2, 3, 1):
                num_backwards = calls * M if calls > 1 else 1  # of one call there is nothing to say
                module, optimizer, runtime = make(stage, program, mesh, num_backwards, sum_copies=name == "dualpipe")
                for again in range(2 if optimizer else 1):  # the second step is counted anew
                    if again:
                        optimizer.zero_grad()
                    for number in range(calls):
                        call(runtime, mesh, number, calls)
                grads = full_gradients(optimizer) if optimizer else {n: p.grad for n, p in module.named_parameters()}
                if not optimizer:
                    for grad in grads.values():
                        lab.comm.all_reduce(grad, group=mesh.group("dp"))
                        grad /= 2
                keys = {name: (int(name.split(".")[1]), name.split(".", 2)[2]) for name in grads}
                found[stage and stage.__name__, calls] = {keys[name]: grad for name, grad in grads.items()}
        return found

    number = lab.schedules.build(name, 2, M).num_stages
    right = {calls: one_process(number, calls) for calls in (1, 2, 3)}
    for found in launch(fn, 4):
        for (stage, calls), grads in found.items():
            for key, grad in grads.items():
                assert (grad - right[calls][key]).abs().max() < 1e-15, (stage, calls, key)


def test_calls_that_nobody_announced_and_other_numbers_are_refused():
    def fn(rank, world_size):
        mesh, found = lab.Mesh(lab.Topology([("pp", 2), ("dp", 2)])), []
        program = lab.schedules.build("1f1b", 2, M)
        for stage in (DDP, Zero1):
            for num_backwards, match in ((1, "set num_backwards to the microbatches of all"), (6, "use a multiple")):
                _, optimizer, runtime = make(stage, program, mesh, num_backwards)
                if num_backwards == 1:
                    with pytest.raises(ValueError, match=match):
                        call(runtime, mesh, 0, 2)  # a half of the shares: of two calls, or divided by the data ranks
                    call(runtime, mesh, 0, 1)
                with pytest.raises(ValueError, match=match):
                    call(runtime, mesh, 1, 1)
            _, optimizer, runtime = make(stage, program, mesh, 2 * M)
            for number in range(2):
                call(runtime, mesh, number, 2)
            with pytest.raises(ValueError, match="whose sum over the data ranks has begun"):
                call(runtime, mesh, 2, 2)
            found.append(optimizer.step(max_norm=1.0).norm)
        return found

    right = one_process(2, 2)
    norm = sum(float(grad.square().sum()) for grad in right.values()) ** 0.5
    assert all(abs(one - norm) < 1e-14 for found in launch(fn, 4) for one in found)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_a_pipeline_are_not_touched_between_its_calls_and_the_update(stage):
    """Neither is a norm that of one stage, nor are copies of a stage left apart."""

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("pp", 2), ("dp", 2)]))
        program = lab.schedules.build("zero_bubble_h1", 2, M)
        module, optimizer, runtime = make(stage, program, mesh, 2 * M)
        for number in range(2):
            call(runtime, mesh, number, 2)
            with pytest.raises(ValueError, match="is used between backward and step"):
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        assert optimizer.step(max_norm=1.0).stepped

        part = draw(2)[mesh.rank("pp")]
        units = {"units": [part[0]]} if stage is Zero3 else {}
        optimizer = stage(part, mesh.group("dp"), **units)
        runtime = lab.PipelineRuntime(program, {mesh.rank("pp"): part}, nn.functional.mse_loss, group=mesh.group("pp"))
        call(runtime, mesh, 0, 1)
        with pytest.raises(ValueError, match=r"a pipeline over ranks \[\d, \d\] runs the module; give the"):
            optimizer.step(max_norm=1.0)
        assert optimizer.step().stepped

        program = lab.schedules.build("dualpipe", 2, M)
        _, optimizer, runtime = make(stage, program, mesh, 1, sum_copies=False)
        call(runtime, mesh, 0, 1)
        with pytest.raises(ValueError, match="have copies on other ranks of the pipeline, and nobody has added"):
            optimizer.step()
        _, optimizer, runtime = make(stage, program, mesh, 1, sum_copies=True)
        call(runtime, mesh, 0, 1)
        return optimizer.step(max_norm=1.0).norm

    norm = sum(float(grad.square().sum()) for grad in one_process(2, 1).values()) ** 0.5
    assert all(abs(found - norm) < 1e-14 for found in launch(fn, 4))
