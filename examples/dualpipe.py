"""One step of DualPipe beside one process: equal loss, equal gradients, equal outputs.

    python examples/dualpipe.py --ranks 4 --microbatches 8
    torchrun --nproc-per-node 4 examples/dualpipe.py --microbatches 8

Every rank holds two stages, one for each direction; a stage's two copies add their gradients at the end of the step.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

import dualpipe_lab as lab
from dualpipe_lab import comm, schedules
from dualpipe_lab.pp import Program

ROWS, HIDDEN = 3, 64


class Block(nn.Module):
    """A stage: an MLP, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """`x_..D` in and out."""
        return x + self.down(gelu(self.up(x)))


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The length of the difference, relative to that of the expected tensor."""
    return float((ours - theirs).norm() / theirs.norm())


def compare(rank: int, world_size: int, program: Program) -> tuple[float, float, float]:
    """Differences of loss, gradients and outputs between the pipeline and one process, on this rank."""
    torch.manual_seed(0)  # the same model and data on every rank
    num_microbatches = program.num_microbatches
    model = nn.Sequential(*(Block() for _ in range(program.num_stages))).double()
    inputs, targets = torch.randn(2, num_microbatches, ROWS, HIDDEN, dtype=torch.float64)

    expected = torch.stack([mse_loss(model(x), y) for x, y in zip(inputs, targets, strict=True)]).mean()
    expected.backward()
    grads = [[parameter.grad for parameter in stage.parameters()] for stage in model]
    model.zero_grad()

    placed = {action.stage: model[action.stage] for action in program.actions(rank)}
    runtime = lab.PipelineRuntime(program, placed, mse_loss)
    result = runtime.step(list(inputs), list(targets))
    loss = torch.stack([torch.zeros((), dtype=torch.float64), *result.losses.values()]).sum()
    comm.all_reduce(loss)  # DualPipe's two ends have the losses of one direction each, rank 0 of a V has all
    outputs = runtime.evaluate(list(inputs)).outputs
    with torch.no_grad():
        off = max((difference(y, model(inputs[m])) for m, y in outputs.items()), default=0.0)
    pairs = [pair for i, stage in placed.items() for pair in zip(stage.parameters(), grads[i], strict=True)]
    return float(abs(loss - expected.detach())), max(difference(p.grad, grad) for p, grad in pairs), off


def main(schedule: str, description: str | None) -> None:
    """Compare on the ranks of the command line, and say how far the pipeline is off."""
    started = lab.cluster()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=started.world_size if started else 4)
    parser.add_argument("--microbatches", type=int, default=8)
    chosen = parser.parse_args()
    program = schedules.build(schedule, chosen.ranks, chosen.microbatches)  # refused before a process starts
    results = lab.launch(compare, chosen.ranks, program, timeout=120)
    loss, grad, output = (max(column) for column in zip(*results, strict=True))
    assert max(loss, grad, output) < 1e-13, (loss, grad, output)
    if started is None or started.rank == 0:
        print(f"{schedule}, {chosen.ranks} ranks: loss off by {loss:.1e}, gradients {grad:.1e}, outputs {output:.1e}")


if __name__ == "__main__":
    main("dualpipe", __doc__)
