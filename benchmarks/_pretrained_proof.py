"""Plans beside transformers: which there are, and what a rank measures of a published model under each.

In float64 on the same sequences, from a folder that transformers has written: the logits of all microbatches, the loss
of a step and its raw gradients.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from time import process_time
from typing import Any, NamedTuple

import torch
from _proof import Config, Errors, Spy, short, trainer_distance
from _resumable import append
from torch import Tensor

import dualpipe_lab as lab
from dualpipe_lab import cp, models, train

LIMITS = {"logits": 1e-10, "loss": 1e-10, "gradients": 1e-10}
RANKS = 8
MOST_LAYERS = 2 * RANKS  # two for every rank of pp, as schedules in V need
LENGTH, VOCABULARY, ROWS = 48, 48, 2  # tokens of a sequence, of which there are two in a microbatch
CHUNK = 7  # tokens of a loss in chunks: no divisor of the tokens of a rank


@dataclass(frozen=True)
class Case:
    """A family, a plan, and a number of layers for its stages."""

    family: str
    plan: lab.Plan
    num_layers: int

    @property
    def global_batch(self) -> int:
        """Sequences of the step."""
        return ROWS * self.plan.data_size * self.plan.num_microbatches

    @property
    def key(self) -> tuple[str, int, int]:
        """The cases with equal keys compare with the same numbers."""
        return self.family, self.num_layers, self.global_batch

    def __str__(self) -> str:
        return f"{self.family} of {self.num_layers} layers: {self.plan}"


class Right(NamedTuple):
    """What transformers computes, and the folder it has written; gradients by our names."""

    folder: str
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def published() -> Any:
    """The models of transformers that the tests have too; ranks do not import them."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "whole"))
    try:
        import published as found
    finally:
        sys.path.pop(0)
    return found


def model_of(family: str, num_layers: int) -> Any:
    """The tiny model of transformers, with random weights."""
    options = published().PLANNED[family] | {"num_hidden_layers": num_layers}
    return published().reference(**options)


@cache
def config_of(family: str, num_layers: int) -> Config:
    """The sizes of a family, as read from the config of transformers."""
    return models.config_from_pretrained(model_of(family, num_layers).config.to_dict())


def cases(most_ranks: int = RANKS) -> Iterator[Case]:
    """Every tp x cp x ep x pp of up to so many ranks that divides each family's model, once.

    The schedules take turns where pp is above 1, and the other settings are drawn.
    """
    for family in published().PLANNED:
        config = config_of(family, MOST_LAYERS)
        turns, draw = deque(lab.schedules.names(synchronous=True)), Random(family)
        for grid in grids(config, most_ranks):
            plan = varied(with_schedule(grid, turns, config), config, draw)
            uneven = plan.num_microbatches > plan.pp > 1  # one layer more, so that stages differ
            yield Case(family, plan, max(3, plan.num_stages + uneven))


def grids(config: Config, most_ranks: int) -> Iterator[lab.Plan]:
    """Every tp x cp x ep x pp that divides; a layout that a size of cp allows is looked for too."""
    found = {}
    settings = {"num_microbatches": 2 * most_ranks, "precision": "float64"}
    for num_ranks in range(1, most_ranks + 1):
        for layout in cp.LAYOUTS:
            every = lab.Plan.all(config, num_ranks, LENGTH, [0], ["gpipe"], layout=layout, **settings)
            for plan in every:
                if plan.dp == 1 and not plan.experts_in_data:
                    found.setdefault((plan.pp, plan.cp, plan.ep, plan.tp), plan)
    yield from found.values()


def with_schedule(plan: lab.Plan, turns: deque[str], config: Config) -> lab.Plan:
    """The plan with the first schedule in the queue that allows it, which goes to the end of the queue."""
    if plan.pp == 1:
        return replace(plan, num_microbatches=2)
    for name in turns:
        changed = replace(plan, schedule=name)
        if is_legal(changed, config):
            turns.remove(name)
            turns.append(name)
            return short(changed, len(turns) + plan.world_size)
    raise AssertionError(f"no schedule allows {plan}")


def varied(plan: lab.Plan, config: Config, draw: Random) -> lab.Plan:
    """The plan with other settings that are drawn, where they are legal."""
    settings = {
        "sequence_parallel": plan.tp > 1 and draw.random() < 0.5,
        "recompute": draw.random() < 0.3,
        "layout": draw.choice(cp.LAYOUTS) if plan.cp > 1 else plan.layout,
        "overlap": draw.random() < 0.7,
        "loss_chunk": CHUNK if draw.random() < 0.3 else None,
    }
    for name, value in settings.items():
        changed = replace(plan, **{name: value})
        plan = changed if is_legal(changed, config) else plan
    return plan


def is_legal(plan: lab.Plan, config: Config) -> bool:
    """Whether a plan fits a model."""
    try:
        plan.check(config, LENGTH)
    except ValueError:
        return False
    return True


def options(case: Case, start: str | None = None) -> train.TrainOptions:
    """The options of a training of one step."""
    return train.TrainOptions(sequence_length=LENGTH, global_batch=case.global_batch, max_norm=None, start=start)


def documents() -> list[bytes]:
    """Texts of unequal length, in bytes that a small vocabulary has: sequences end early, and targets are missing."""
    draw = Random(3)
    return [bytes(draw.randrange(VOCABULARY) for _ in range(draw.randint(LENGTH // 2, LENGTH + 1))) for _ in range(40)]


def references(folder: Path) -> Callable[[Sequence[Case]], dict[tuple[str, int, int], Right]]:
    """A function that returns what the ranks compare with; published folders are written below `folder`."""

    @cache
    def expected(family: str, num_layers: int, global_batch: int) -> Right:
        torch.set_num_threads(1)  # tensors of a few hundred numbers: threads only wait for one another
        tools, target = published(), folder / f"{family} {num_layers}".replace(", ", "-").replace(" ", "-")
        model = model_of(family, num_layers)
        if not target.exists():
            tools.transformers.utils.logging.disable_progress_bar()
            model.save_pretrained(target)
        batch = train.TrainOptions(sequence_length=LENGTH, global_batch=global_batch).sampler(documents()).batch(0)
        logits, loss, grads = tools.gradients(tools.exact(model), batch.inputs[0], batch.targets[0])
        return Right(str(target), logits, loss, tools.by_our_names(grads, config_of(family, num_layers)))

    return lambda chosen: {case.key: expected(*case.key) for case in chosen}


def prove_all(
    rank: int,
    world_size: int,
    chosen: Sequence[Case],
    right: dict[tuple[str, int, int], Right],
    file: str | None = None,
) -> list[Errors]:
    """In a rank: run each plan, one after the other; the worst errors of all ranks.

    Rank 0 appends a line of JSON to the file for each plan.
    """
    found = []
    for case in chosen:
        every: list[Errors] = lab.comm.all_gather_object(prove(case, right[case.key]))
        found.append(together(every, right[case.key]))
        if file and rank == 0:
            append(Path(file), case, found[-1])
    return found


def together(every: Sequence[Errors], right: Right) -> Errors:
    """The worst of all ranks; infinite where logits or gradients of the full model are on no rank."""
    worst: Errors = {name: max(errors[name] for errors in every) for name in LIMITS}
    if set().union(*(errors["names"] for errors in every)) != set(right.gradients):
        worst["gradients"] = float("inf")
    if not torch.stack([errors["seen"] for errors in every]).any(0).all():
        worst["logits"] = float("inf")
    worst["cpu"] = round(sum(errors["cpu"] for errors in every), 2)
    return worst


def prove(case: Case, right: Right) -> Errors:
    """In a rank: this rank's errors under one plan."""
    began, chosen = process_time(), options(case, right.folder)
    trainer = train.Trainer(models.config_from_pretrained(right.folder), case.plan, chosen)
    batch, spy = trainer.batch(chosen.sampler(documents())), Spy(trainer)
    logits, seen = compare_logits(trainer, batch.inputs, right.logits)
    spy.wanted = True
    loss = trainer.step(batch).loss
    (gradients,) = spy.found
    declared = trainer.optimizer.spec.parameters
    return {
        "logits": logits,
        "loss": abs(loss / float(right.loss) - 1),
        "gradients": trainer_distance(trainer)(gradients, right.gradients),
        "names": {declared[parameter].name for parameter in gradients},
        "seen": seen,
        "cpu": process_time() - began,
    }


def compare_logits(trainer: train.Trainer, inputs: list[Tensor], right: Tensor) -> tuple[float, Tensor]:
    """The largest distance of this rank's logits, relative to the largest of all, and which of all logits it has."""
    far, seen, plan = 0.0, torch.zeros(right.shape, dtype=torch.bool), trainer.plan
    positions = torch.arange(LENGTH)
    if trainer.layout is not None:
        positions = cp.positions(trainer.layout, trainer.mesh.rank("cp"))
    width = right.shape[-1] // plan.tp
    tokens = torch.arange(width) + width * trainer.mesh.rank("tp")
    for m, found in trainer.outputs(inputs).items():
        rows = torch.arange(ROWS) + ROWS * (trainer.data_rank * plan.num_microbatches + m)
        places = rows[:, None, None], positions[:, None], tokens
        far = max(far, float((found - right[places]).abs().max()))
        seen[places] = True
    return far / float(right.abs().max()), seen


def problems(errors: Errors) -> list[str]:
    """What is beyond the limits, in words; nothing where all is well."""
    return [f"{name} off by {errors[name]:.1e}" for name, limit in LIMITS.items() if not errors[name] <= limit]
