"""Every plan goes on from every other plan's checkpoint: save at step 3 under one, resume under another up to step 5.

In float64, for a tiny Llama and a tiny V3 with balance loss and moving biases, with a moving average of the weights.
A cell is the worst deviation from the training in one process that was never interrupted: of loss and norm (relative)
of the steps after the checkpoint, and of the last weights (relative to the largest one).
All trainings of four ranks share one launch, so that 7 x 7 cells of a model take seconds.

    python benchmarks/resumes.py [--model llama|v3]
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _proof import LIMITS, trainer_distance
from rich.console import Console
from rich.table import Table

import dualpipe_lab as lab
from dualpipe_lab import data, dp, models, train

SAVED, STEPS, RANKS = 3, 5, 4
SIZES = {"hidden_size": 16, "ffn_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
EXPERTS = {"expert_ffn_size": 16, "num_experts": 4, "num_groups": 2, "balance": 1e-2}
CONFIGS = {"llama": models.LlamaConfig(**SIZES), "v3": models.V3MoEConfig(**SIZES, **EXPERTS)}
OPTIONS: dict[str, Any] = {
    "sequence_length": 16,
    "global_batch": 8,
    "lr": 1e-2,
    "schedule": train.LRSchedule("cosine", num_warmup=2, num_steps=STEPS, final=0.1),
    "max_norm": 0.5,
    "bias_speed": 1e-2,
    "ema": 0.9,
}
DUALPIPE: dict[str, Any] = {"pp": 2, "num_microbatches": 4, "schedule": "dualpipe"}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {},
        {"dp": 4, "zero": 1},
        {"dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True},
        {"dp": 2, "cp": 2, "zero": 3},
        {**DUALPIPE, "dp": 2},
        {"pp": 4, "num_microbatches": 4},
        {**DUALPIPE, "schedule": "dualpipev", "tp": 2},
    ],
    "v3": [
        {},
        {"dp": 4, "zero": 3},
        {"dp": 4, "ep": 2, "experts_in_data": True, "zero": 2},
        {"ep": 2, "tp": 2, "sequence_parallel": True},
        {"ep": 2, "cp": 2, "zero": 1},
        {**DUALPIPE, "ep": 2, "overlap": True},
        {**DUALPIPE, "schedule": "dualpipev", "dp": 2, "zero": 1},
    ],
}
Cells = dict[tuple[int, int], float]


def plans(model: str) -> list[lab.Plan]:
    """The rows and columns of a model's matrix: one process, then plans of four ranks over all axes and ZeRO 0 to 3."""
    return [lab.Plan(precision="float64", **settings) for settings in SETTINGS[model]]


def save_all(rank: int, world_size: int, model: str, chosen: list[lab.Plan], folder: Path) -> None:
    """In a rank: train under each plan of so many ranks, and save each in a folder of its own."""
    for _, trainer, sampler in trainers(world_size, model, chosen, folder):
        while trainer.num_steps < SAVED:
            trainer.step(trainer.batch(sampler))
        trainer.save(sampler)


def resume_all(
    rank: int, world_size: int, model: str, chosen: list[lab.Plan], folder: Path, right: train.Result
) -> Cells:
    """In a rank: under each plan of so many ranks, go on from each plan's checkpoint; this rank's deviations."""
    found = {}
    for before in range(len(chosen)):
        for after, trainer, sampler in trainers(world_size, model, chosen, folder):
            trainer.load(dp.checkpoint.latest(folder / str(before)))
            far = []
            for expected in right.metrics[SAVED:]:
                row = trainer.step(trainer.batch(sampler))
                assert row.step == expected.step
                far += [abs(row.loss / expected.loss - 1), abs(row.norm / expected.norm - 1)]
            with trainer.optimizer.gathered():
                weights = {parameter: parameter.detach() for parameter in trainer.optimizer.names}
                far.append(trainer_distance(trainer)(weights, right.weights()))
            found[before, after] = max(far)
    return found


def trainers(
    world_size: int, model: str, chosen: list[lab.Plan], folder: Path
) -> Iterator[tuple[int, train.Trainer, train.Sampler]]:
    """A new trainer, and its data, for each plan of so many ranks; by its number among the chosen ones."""
    for number, plan in enumerate(chosen):
        if plan.world_size == world_size:
            trainer = train.Trainer(CONFIGS[model], plan, train.TrainOptions(**OPTIONS, folder=folder / str(number)))
            yield number, trainer, trainer.options.sampler(data.frozen_corpus())


def matrix(model: str, chosen: list[lab.Plan]) -> Cells:
    """The deviations of all pairs of plans, the worst of all ranks: by the numbers of the two plans."""
    torch.set_num_threads(1)  # tensors of a few hundred numbers: threads only wait for one another
    unaveraged = {name: value for name, value in OPTIONS.items() if name != "ema"}  # it does not touch the training
    right = train.reference(CONFIGS[model], data.frozen_corpus(), STEPS, **unaveraged)
    found: Cells = {}
    sizes = sorted({plan.world_size for plan in chosen})
    with tempfile.TemporaryDirectory() as folder:
        given = model, chosen, Path(folder)
        for ranks in sizes:
            lab.launch(save_all, ranks, *given, timeout=600)
        for ranks in sizes:
            every = lab.launch(resume_all, ranks, *given, right, timeout=1800)
            found |= {cell: max(one[cell] for one in every) for cell in every[0]}
    return found


def show(model: str, found: Cells) -> Table:
    """The matrix as a table: a row for each plan that saved, a column for each that resumed."""
    chosen = plans(model)
    title = f"{model}: saved at step {SAVED}, resumed to step {STEPS}; worst deviation {max(found.values()):.1e}"
    table = Table("saved under", *map(str, range(len(chosen))), title=title)
    for before, plan in enumerate(chosen):
        name = str(plan).removesuffix(", float64")
        table.add_row(f"{before}: {name}", *(f"{found[before, after]:.1e}" for after in range(len(chosen))))
    return table


def main() -> None:
    """Print the matrices; fail if a cell is beyond the bounds of the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS)
    model = parser.parse_args().model
    for name in [model] if model else CONFIGS:
        found = matrix(name, plans(name))
        Console(width=140).print(show(name, found))
        if max(found.values()) > LIMITS["weights"]:
            sys.exit(f"{name}: a resumed training is off by {max(found.values()):.1e}")


if __name__ == "__main__":
    main()
