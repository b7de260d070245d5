"""Many programs in one launch: what the tests of the runtime share."""

import torch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.pp.program import B, F, W
from dualpipe_lab.pp.runtime import PipelineRuntime

WIDTH, ROWS = 4, 3
BYTES = WIDTH * ROWS * 8
LIKE = torch.empty(ROWS, WIDTH, dtype=torch.float64)


class Returns(nn.Module):
    """What a function makes of its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def make_stages(number, seed=0):
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(number)]


def make_batch(number, seed=1, rows=None):
    """Inputs and targets; `rows` says how many each microbatch has."""
    generator = torch.Generator().manual_seed(seed)
    rows = rows or [ROWS] * number
    return [[torch.randn(size, WIDTH, dtype=torch.float64, generator=generator) for size in rows] for _ in range(2)]


def grads_of(module):
    return [parameter.grad for parameter in module.parameters()]


def run_all(programs, num_ranks, batches=None, weights=None, boundary=LIKE, **options):
    """Run programs in one launch; per program and rank: gradients by stage, losses, two peaks, when it began."""
    settings = {name: options.pop(name) for name in ("cost", "lookahead") if name in options}
    settings["sum_copies"] = False  # the gradients of each copy are looked at
    stages = {program.num_stages: make_stages(program.num_stages) for program in programs}
    batches = batches or [make_batch(program.num_microbatches) for program in programs]

    def fn(rank, world_size):
        torch.manual_seed(100 + rank)  # a missing copy of the weights would show
        results = []
        for number, (program, batch) in enumerate(zip(programs, batches, strict=True)):
            comm.barrier()
            began = lab.now()
            mine = {action.stage: stages[program.num_stages][action.stage] for action in program.actions(rank)}
            for module in mine.values():
                module.zero_grad()
            runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, boundary, **settings)
            result = runtime.step(*batch, weights[number] if weights else None)
            grads = {index: [grad.clone() for grad in grads_of(module)] for index, module in mine.items()}
            losses = {m: loss.item() for m, loss in result.losses.items()}
            results.append((grads, losses, result.peak_activations, result.peak_buffers, began))
        return results

    out = lab.launch(fn, num_ranks, timeout=120, **options)
    return out, [[values[number] for values in out] for number in range(len(programs))]


def backward_order(program, stage, rank):
    """The microbatches in the order in which a rank adds up a stage's gradients."""
    return [action.microbatch for action in program.actions(rank) if action.stage == stage and action.kind in (B, W)]


def expected_grads(program, batch, weights=None):
    """For each rank, the gradients of its stages by plain accumulation in the order of its own backwards."""
    model = nn.Sequential(*make_stages(program.num_stages))
    number = program.num_microbatches
    parts, loss = [], 0.0
    for x, y, weight in zip(*batch, weights or [1 / number] * number, strict=True):
        model.zero_grad()
        part = nn.functional.mse_loss(model(x), y) * weight
        part.backward()
        loss += part.item()
        parts.append([[grad.clone() for grad in grads_of(stage)] for stage in model])
    ranks = []
    for rank in range(program.num_ranks):
        stages = {action.stage for action in program.actions(rank) if action.kind == F}
        ranks.append({stage: _sum(parts, stage, backward_order(program, stage, rank)) for stage in stages})
    return ranks, loss


def _sum(parts, stage, order):
    total = [grad.clone() for grad in parts[order[0]][stage]]
    for microbatch in order[1:]:
        for have, grad in zip(total, parts[microbatch][stage], strict=True):
            have += grad
    return total


def assert_trains_as_one_process(program, stages, loss_fn, batch, weights=None):
    """One step on ranks: the losses, gradients and buffers of one process by plain accumulation."""
    last, number = program.num_stages - 1, program.num_microbatches

    def tensors_of(module):
        return [*grads_of(module), *module.buffers()]

    def fn(rank, world_size):
        torch.manual_seed(100 + rank)
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        result = PipelineRuntime(program, mine, loss_fn).step(*batch, weights)
        found = {stage: tensors_of(module) for stage, module in mine.items()}
        if last in mine and isinstance(loss_fn, nn.Module):
            found["loss"] = tensors_of(loss_fn)
        return found, sum(map(float, result.losses.values()))

    out, total = lab.launch(fn, program.num_ranks), 0.0
    for x, y, weight in zip(*batch, weights or [1 / number] * number, strict=True):
        if weight == 0:
            continue  # its mean may be 0 / 0
        for stage in stages:
            x = stage(*x) if isinstance(x, tuple) else stage(x)
        loss = loss_fn(x, y) * weight
        loss.backward()
        total += float(loss.detach())
    assert abs(sum(loss for _, loss in out) - total) <= 1e-12
    for found, _ in out:
        for stage, ours in found.items():
            close(ours, tensors_of(loss_fn if stage == "loss" else stages[stage]))


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).abs().max() <= 1e-12 * max(1, b.abs().max())


def bitwise(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
