"""A training step under pp 2 x dp 2 x tp 2 beside torch's own three parts together, on 8 GLOO ranks.

The same tiny Llama from the same weights, the same sequences, 1F1B, AdamW, float32, one thread per rank.  Torch's side
is `parallelize_module` (tensors), `fully_shard` (FSDP2) and `torch.distributed.pipelining`.  In each round both
contenders take some steps, one after the other and in turns first; medians over the rounds, and the median of the
rounds' ratios.  CPU time is that of rank 0's process with GLOO's threads.  Peak memory is what a rank's process grows
by from before the model is built, the largest of all ranks, of each contender in processes of its own.

    python benchmarks/whole.py [--rounds 9] [--steps 2] [--hidden 256] [--layers 4] [--tokens 64] [--microbatches 4]
"""

import argparse
import gc
import resource
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _paired import cells, in_turns, paired, paired_table, spread
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as peer

import dualpipe_lab as lab
from dualpipe_lab import data, models, tp, train
from dualpipe_lab.models import LlamaConfig, PlainLlama

RANKS, ROWS = 8, 2  # sequences of a microbatch
TITLES = {
    "zero2": "ZeRO-2 / FSDP2, weights kept between the microbatches",
    "zero3": "ZeRO-3 / FSDP2, weights gathered for every microbatch",
}
Step = Callable[[], float]


class TorchStage(nn.Module):
    """One half of a plain Llama: the embedding and the first layers, or the last layers, the norm and the head."""

    def __init__(self, model: PlainLlama, number: int) -> None:
        super().__init__()
        layers = list(model.layers)
        half = len(layers) // 2
        self.embedding = model.embedding if number == 0 else None
        self.layers = nn.ModuleList(layers[half:] if number else layers[:half])
        self.norm, self.head = (model.norm, model.head) if number else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return x_BSD of ids_BS, or logits_BSV of x_BSD."""
        x = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(x.shape[1])
        for layer in self.layers:
            x = layer(x, positions)
        return x if self.head is None else self.head(self.norm(x))


def sharded(stage: TorchStage, mesh: DeviceMesh, keeps: bool) -> nn.Module:
    """Shard a stage by torch: its layers along tp, and all of it along dp."""
    whole = Replicate()
    layer: dict[str, Any] = {
        name: peer.ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    }
    layer |= {name: peer.RowwiseParallel() for name in ("attention.o", "mlp.down")}
    for block in stage.layers:
        peer.parallelize_module(block, mesh["tp"], layer)
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=not keeps)
    if stage.head is None:
        end: dict[str, Any] = {"embedding": peer.RowwiseParallel(input_layouts=whole)}
    else:
        end = {"head": peer.ColwiseParallel(output_layouts=whole)}
    peer.parallelize_module(stage, mesh["tp"], end)
    return fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=not keeps)


def options(chosen: argparse.Namespace) -> dict[str, Any]:
    """What both train on: the same weights and sequences."""
    return {
        "sequence_length": chosen.tokens,
        "global_batch": 2 * chosen.microbatches * ROWS,
        "schedule": train.LRSchedule("constant"),
        "max_norm": None,
    }


def ours(kind: str, config: LlamaConfig, chosen: argparse.Namespace) -> Step:
    """A step of the library."""
    plan = lab.Plan(pp=2, dp=2, tp=2, num_microbatches=chosen.microbatches, zero=int(kind[-1]))
    trainer = train.Trainer(config, plan, train.TrainOptions(**options(chosen)))
    sampler = trainer.options.sampler(data.frozen_corpus())
    batch = trainer.batch(sampler, 0)
    return lambda: trainer.step(batch).loss


def theirs(kind: str, config: LlamaConfig, chosen: argparse.Namespace) -> Step:
    """A step of torch."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    number, settings = mesh["pp"].get_local_rank(), train.TrainOptions(**options(chosen))
    model = PlainLlama(config)
    tp.initialize_parameters(model, settings.seed)
    module = sharded(TorchStage(model, number), mesh, keeps=kind == "zero2")
    del model
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, chosen.microbatches, loss_fn=mean_loss)
    optimizer = torch.optim.AdamW(module.parameters(), **settings.adamw)
    sampler = settings.sampler(data.frozen_corpus())
    batch = sampler.batch(0, chosen.microbatches, mesh["dp"].get_local_rank(), 2)
    ids, targets = torch.cat(batch.inputs), torch.cat(batch.targets)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if number == 0:
            schedule.step(ids)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        return sum(float(loss.detach()) for loss in losses) / chosen.microbatches

    return step


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of a microbatch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


BUILD = {"ours": ours, "theirs": theirs}


def compare(rank: int, world_size: int, kind: str, config: LlamaConfig, chosen: argparse.Namespace) -> tuple[Any, ...]:
    """What both took in every round, and the losses of two steps of each."""
    both = {name: build(kind, config, chosen) for name, build in BUILD.items()}
    losses = {name: [step() for _ in range(2)] for name, step in both.items()}
    gc.freeze()
    return paired(both, chosen.rounds, chosen.steps), losses


def difference(losses: list[dict[str, list[float]]]) -> float:
    """How far the losses are apart: torch's are on the last stage alone, for the sequences of one of two data ranks."""
    halves = losses[RANKS // 2]["theirs"], losses[-1]["theirs"]
    return max(abs(mine - (one + two) / 2) for mine, one, two in zip(losses[0]["ours"], *halves, strict=True))


def grown(rank: int, world_size: int, name: str, kind: str, config: LlamaConfig, chosen: argparse.Namespace) -> int:
    """The bytes by which this rank's peak memory grows from building one contender to its third step."""
    before = peak()
    step = BUILD[name](kind, config, chosen)
    for _ in range(3):
        step()
    return peak() - before


def peak() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(kind: str, config: LlamaConfig, chosen: argparse.Namespace) -> list[str]:
    """Peak memory of both in MB, and the median of the rounds' ratios with its spread."""
    found: dict[str, list[int]] = {name: [] for name in BUILD}
    for number in range(chosen.memory_rounds):
        for name in in_turns(BUILD, number):
            arguments = name, kind, config, chosen
            found[name].append(max(lab.launch(grown, RANKS, *arguments, timeout=600, output="collect")))
    ratios = [one / other for one, other in zip(found["ours"], found["theirs"], strict=True)]
    return [*(f"{statistics.median(values) / 2**20:.1f}" for values in found.values()), spread(ratios)]


def main() -> None:
    """Run both comparisons and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 9), ("steps", 2), ("hidden", 256), ("layers", 4), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--memory-rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=TITLES, default=list(TITLES))
    chosen = parser.parse_args()
    width = chosen.hidden
    config = models.LlamaConfig(256, width, 4 * width, chosen.layers, num_heads=8, num_kv_heads=4)
    title = f"pp 2 x dp 2 x tp 2, {RANKS} GLOO ranks, {config.num_parameters() / 1e6:.1f} million fp32 parameters"
    table = paired_table(f"{title}, {chosen.rounds} rounds", more=("peak MB", "theirs", "ratio (least to most)"))
    for kind in chosen.only:
        launched = lab.launch(compare, RANKS, kind, config, chosen, timeout=1800, output="collect")
        found = launched[0][0]
        print(f"{kind}: the losses of two steps differ by {difference([losses for _, losses in launched]):.1e}")
        table.add_row(TITLES[kind], *cells(found), *memory(kind, config, chosen))
        print(
            spread([one / two for one, two in zip(found["wall ours"], found["wall theirs"], strict=True)]), flush=True
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
