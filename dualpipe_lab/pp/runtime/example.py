"""The small model of the pipeline chapters: one transformer block per stage, trained on the text of the course.

Chapter: book/pp/gpipe, which builds it.  In: numbers of stages and microbatches.  Out: modules, data, gradients.
  a boundary   ROWS * LENGTH * HIDDEN float64 numbers: 12,288 bytes, as activation and as gradient
The model predicts the next byte.  The first stage also has the embedding, the last stage the output layer.  All tensors
are float64, so that a wrong gradient differs by far more than rounding does, and live on the device of the rank.
`run_steps` and `accumulate` are functions for `launch`: the pipeline on its ranks, and the reference on one rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from dualpipe_lab import comm, data
from dualpipe_lab.launch.context import device
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime.runtime import PipelineRuntime
from dualpipe_lab.timeline import Timeline

ROWS, LENGTH, HIDDEN = 2, 24, 32  # sequences in a microbatch, bytes in each, features
BOUNDARY_BYTES = ROWS * LENGTH * HIDDEN * 8

Microbatches = tuple[list[Tensor], list[Tensor]]


class Block(nn.Module):  # type: ignore[misc]  # torch is not type-checked here
    """Causal attention, then an MLP, both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """[ROWS, LENGTH, HIDDEN] in and out."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + scaled_dot_product_attention(q, k, v, is_causal=True)
        mlp: Tensor = self.down(gelu(self.up(x)))
        return x + mlp


class RankReport(NamedTuple):
    """The gradients and peaks that a rank reports after its steps.

    Attributes:
        grads: by stage, the gradients of its parameters.
        peak_activations: the most activations that the rank held.
        peak_buffers: the most receive buffers that it held.
    """

    grads: dict[int, list[Tensor]]
    peak_activations: int
    peak_buffers: int


def make_stages(num_stages: int, seed: int = 0) -> list[nn.Sequential]:
    """Build the stages of the model; equal arguments give equal weights, and the global generator keeps its state.

    >>> [len(stage) for stage in make_stages(3)]
    [2, 1, 2]
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stages = [nn.Sequential(Block()) for _ in range(num_stages)]
        stages[0].insert(0, nn.Embedding(data.VOCABULARY_SIZE, HIDDEN))
        stages[-1].append(nn.Linear(HIDDEN, data.VOCABULARY_SIZE))
    return [stage.to(device(), torch.float64) for stage in stages]


def make_batch(num_microbatches: int, seed: int = 0) -> Microbatches:
    """Return tokens and targets, one tensor [ROWS, LENGTH] of each per microbatch; an equal seed gives equal data."""
    stream = data.batches(ROWS, LENGTH, seed)
    microbatches = [next(stream) for _ in range(num_microbatches)]
    return [tokens for tokens, _ in microbatches], [targets for _, targets in microbatches]


def boundary() -> Tensor:
    """Return an example of what one stage sends to the next."""
    return torch.empty(ROWS, LENGTH, HIDDEN, dtype=torch.float64, device=device())


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a microbatch, in nats per byte."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def grads_of(module: nn.Module) -> list[Tensor]:
    """Return the gradients of a module's parameters, in their order, without parameters that have none."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are equal, bit for bit.

    Raises:
        ValueError: the lists differ in length.
    """
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def run_steps(
    rank: int,
    world_size: int,
    program: Program,
    stages: Sequence[nn.Module],
    batch: Microbatches,
    cost: Cost | None = None,
    num_steps: int = 1,
    options: Mapping[str, Any] | None = None,
) -> RankReport:
    """Run a program on this rank, with a barrier before every step; the gradients are those of the last one.

    Every rank seeds its generator differently first, so that weights drawn here, not passed in, would differ.

    Args:
        rank: this rank.
        world_size: the number of ranks.
        program: the program to run.
        stages: all stages of the model; the rank uses those that the program places on it.
        batch: tokens and targets of every microbatch.
        cost: nanoseconds of every action, as for `PipelineRuntime`.
        num_steps: the number of steps, each on the same batch.
        options: further arguments of `PipelineRuntime`, by name.
    """
    torch.manual_seed(1000 + rank)
    local = {action.stage: stages[action.stage] for action in program.actions(rank)}
    runtime = PipelineRuntime(program, local, loss_fn, boundary(), cost=cost, **(options or {}))
    for _ in range(num_steps):
        for stage in local.values():
            stage.zero_grad()
        comm.barrier()
        result = runtime.step(*batch)
    grads = {index: grads_of(stage) for index, stage in local.items()}
    return RankReport(grads, result.peak_activations, result.peak_buffers)


def accumulate(
    rank: int,
    world_size: int,
    stages: Sequence[nn.Module],
    batch: Microbatches,
    order: Sequence[int] | None = None,
) -> list[list[Tensor]]:
    """Return the gradients of every stage by accumulation over the microbatches, without a pipeline.

    Launch it on one rank: both runs then compute with one thread, and can be compared bit for bit.

    Args:
        rank: this rank.
        world_size: the number of ranks.
        stages: the stages of the model, or the model as one stage.
        batch: tokens and targets of every microbatch; each counts 1 / M in the loss.
        order: the microbatches whose gradients are added, in that order; by default all.
    """
    model, number = nn.Sequential(*stages), len(batch[0])
    for microbatch in order or range(number):
        tokens, targets = batch[0][microbatch], batch[1][microbatch]
        (loss_fn(model(tokens), targets) / number).backward()
    return [grads_of(stage) for stage in stages]


def worst_error(ours: Mapping[int, Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]) -> float:
    """Return the largest difference of a rank's gradients from the reference, in units of max(1, largest entry)."""
    pairs = [pair for stage, grads in ours.items() for pair in zip(grads, theirs[stage], strict=True)]
    return max(float((a - b).abs().max() / max(1.0, float(b.abs().max()))) for a, b in pairs)


def median_step(run: Timeline, program: Program) -> Timeline:
    """Return the step of median length of a run, under its program's name; the first of several does not count.

    >>> from dualpipe_lab import schedules, simulate
    >>> program = schedules.gpipe(2, 3)
    >>> median_step(simulate(program), program)
    <Timeline 'GPipe': 2 ranks, makespan 12 ticks, simulated>
    """
    steps = run.steps()
    ordered = sorted(steps[1:] or steps, key=lambda step: step.makespan)
    median = ordered[len(ordered) // 2]
    return Timeline(program.name, median.spans_by_rank, median.messages, median.source, median.unit)
