"""An own model on a pipeline x ZeRO-1, with clipping, a learning-rate schedule of torch, and checkpoints.

    python examples/own_model.py --steps 4 --folder runs/own
    torchrun --nproc-per-node 4 examples/own_model.py --steps 8 --folder runs/own

The second run goes on from the checkpoint of the first.  Both compare their weights with one process in the end.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import dualpipe_lab as lab
from dualpipe_lab import comm, data, dp, schedules

PP, DP, MICROBATCHES, BATCH, LENGTH, WIDTH = 2, 2, 4, 16, 16, 32
ADAMW = {"lr": 5e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAX_NORM = 1.0


class Block(nn.Module):
    """Each token sees the mean of those before it, then an MLP; both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`x_BSD` in and out."""
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + self.norm(x).cumsum(1) / count
        return x + self.down(gelu(self.up(x)))


def make_stages(number: int) -> list[nn.Sequential]:
    """The model in so many stages: the same weights on every rank."""
    torch.manual_seed(0)
    layers = [
        nn.Embedding(256, WIDTH),
        *(Block() for _ in range(6)),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)),
    ]
    size = len(layers) // number
    return [nn.Sequential(*layers[i * size : (i + 1) * size]).double() for i in range(number)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The ids of a step and the ids that follow them."""
    text = torch.tensor(list(data.frozen_corpus()))
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(LENGTH)], text[starts + 1 + torch.arange(LENGTH)]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def factor(step: int) -> float:
    """Of the learning rate: two steps of warm-up, then a cosine."""
    return min(1.0, (step + 1) / 2) * (1 + math.cos(math.pi * min(step / 20, 1))) / 2


def train(rank: int, world_size: int, schedule: str, steps: int, folder: str | None) -> float:
    """Train on this rank; return how far its weights are from those of one process."""
    mesh = lab.Mesh(lab.Topology([("pp", PP), ("dp", DP)]))
    program = schedules.build(schedule, PP, MICROBATCHES)
    every = make_stages(program.num_stages)
    here = program.stages_of(mesh.rank("pp"))
    stages = nn.ModuleDict({str(number): every[number] for number in here})
    optimizer = dp.Zero1(stages, mesh, **ADAMW, max_norm=MAX_NORM, program=program)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    runtime = lab.PipelineRuntime(program, stages, loss_fn, group=mesh.group("pp"))
    first = 0
    if folder and dp.checkpoint.saved_steps(folder):
        restored = dp.checkpoint.load(dp.checkpoint.latest(folder), optimizer)
        first = restored.step
        scheduler.load_state_dict(restored.config)
    for step in range(first, steps):
        optimizer.zero_grad()
        x, y = (part.chunk(DP)[mesh.rank("dp")] for part in batch(step))
        result = runtime.step(x, y)
        report = optimizer.step()
        loss = torch.zeros((), dtype=torch.float64) if result.loss is None else result.loss
        comm.all_reduce(loss)  # the data ranks of the last stage have theirs
        loss /= DP
        if rank == 0:
            print(
                f"step {step}  loss {loss:.6f}  norm {report.norm:.4f}  lr {scheduler.get_last_lr()[0]:.5f}", flush=True
            )
        scheduler.step()
    if folder and first < steps:
        dp.checkpoint.save(folder, steps, optimizer, config=scheduler.state_dict(), topology=mesh.topology)
    expected = train_alone(program.num_stages, steps)
    pairs = [pair for i in here for pair in zip(every[i].parameters(), expected[i].parameters(), strict=True)]
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def train_alone(num_stages: int, steps: int) -> nn.Sequential:
    """The same training in plain torch; return the model."""
    model = nn.Sequential(*make_stages(num_stages))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step)
        loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="dualpipev", choices=["1f1b", "zero_bubble_h1", "dualpipev"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", help="where the checkpoint is; a training goes on from it")
    chosen = parser.parse_args()
    off = max(lab.launch(train, PP * DP, chosen.schedule, chosen.steps, chosen.folder, timeout=120))
    assert off < 1e-10, off
    started = lab.cluster()
    if started is None or started.rank == 0:  # torchrun runs this script once per rank
        print(f"the weights after {chosen.steps} steps are those of one process, up to {off:.1e}")
