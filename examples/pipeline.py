"""One step of a pipeline beside one process: equal loss, equal gradients, equal outputs.

    python examples/pipeline.py --schedule dualpipe --ranks 4 --microbatches 8
    torchrun --nproc-per-node 4 examples/pipeline.py --schedule dualpipev --microbatches 8

Any schedule that keeps the weights of a step: `easy_dualpipe`, `dualpipe`, `dualpipev`, `1f1b`, `zbv` and others.  Its
overlapped pairs, if it has some, are run by the stage's own `overlapped_forward_backward`, as in DeepSeek's DualPipe.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

import dualpipe_lab as lab
from dualpipe_lab import comm, schedules
from dualpipe_lab.pp import ModuleStage, Program, run_pair_by_module

ROWS, HIDDEN = 3, 64


class Block(nn.Module):
    """A stage: an MLP, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """`x_..D` in and out."""
        return x + self.down(gelu(self.up(x)))

    @classmethod
    def overlapped_forward_backward(
        cls,
        module0: "Block",
        inputs0: list[Tensor],
        criterion0: Callable[..., Tensor] | None,
        labels0: list[Tensor],
        module1: "Block",
        loss1: Tensor | None,
        outputs1: list[Tensor],
        output_grads1: list[Tensor],
    ) -> tuple[list[Tensor], Tensor | None]:
        """The forward of module0 in two pieces, and the backward of module1 between them."""
        (x,) = inputs0
        inner = gelu(module0.up(x))
        if loss1 is not None:
            loss1.backward()
        else:
            torch.autograd.backward(outputs1, output_grads1)
        y = x + module0.down(inner)
        return [y], criterion0(y, *labels0) if criterion0 is not None else None


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
    stages = {i: ModuleStage(i, module) for i, module in placed.items()}
    runtime = lab.PipelineRuntime(program, stages, mse_loss, overlapped=run_pair_by_module)
    result = runtime.step(list(inputs), list(targets))
    loss = torch.stack([torch.zeros((), dtype=torch.float64), *result.losses.values()]).sum()
    comm.all_reduce(loss)  # each rank has the losses of the microbatches that end on it
    outputs = runtime.evaluate(list(inputs)).outputs
    with torch.no_grad():
        off = max((difference(y, model(inputs[m])) for m, y in outputs.items()), default=0.0)
    pairs = [pair for i, stage in placed.items() for pair in zip(stage.parameters(), grads[i], strict=True)]
    return float(abs(loss - expected.detach())), max(difference(p.grad, grad) for p, grad in pairs), off


def main() -> None:
    """Compare on the ranks of the command line, and say how far the pipeline is off."""
    started = lab.cluster()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=schedules.names(synchronous=True), default="dualpipe")
    parser.add_argument("--ranks", type=int, default=started.world_size if started else 4)
    parser.add_argument("--microbatches", type=int, default=8)
    chosen = parser.parse_args()
    program = schedules.build(chosen.schedule, chosen.ranks, chosen.microbatches)  # refused before a process starts
    results = lab.launch(compare, chosen.ranks, program, timeout=120)
    loss, grad, output = (max(column) for column in zip(*results, strict=True))
    assert max(loss, grad, output) < 1e-13, (loss, grad, output)
    if started is None or started.rank == 0:
        words = f"{chosen.schedule}, {chosen.ranks} ranks"
        print(f"{words}: loss off by {loss:.1e}, gradients {grad:.1e}, outputs {output:.1e}")


if __name__ == "__main__":
    main()
