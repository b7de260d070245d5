"""Plans beside one process: what a rank measures of a training under each, and the tiny models that divide well.

In float64 on the same sequences: raw gradients of the first and the last step, loss and norm of every step, the weights
at the end; and the messages and bytes of one step beside the plan's own prediction, given the routers' counts.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor

import dualpipe_lab as lab
from dualpipe_lab import data, dp, models, train

STEPS, COUNTED = 5, 2  # the step whose calls are counted: neither the first nor one whose gradients are gathered
LIMITS = {"gradients": 1e-12, "loss": 1e-10, "norm": 1e-10, "weights": 1e-8}
MOST_LAYERS = 16  # two for every one of 8 ranks of pp, as schedules in V need
SIZES = {"hidden_size": 16, "ffn_size": 32, "num_heads": 8, "num_kv_heads": 4}
OPTIONS: dict[str, Any] = {
    "sequence_length": 16,
    "global_batch": 16,  # = data ranks x 2 pp microbatches of at most 8 ranks
    "lr": 1e-3,
    "schedule": train.LRSchedule("cosine", num_warmup=2, num_steps=STEPS, final=0.1),
    "max_norm": 0.5,
    "bias_speed": 1e-2,
}
Config = models.LlamaConfig | models.V3MoEConfig
Errors = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model and a plan."""

    model: str  # "llama" or "v3"
    plan: lab.Plan

    @property
    def num_layers(self) -> int:
        """One for every stage; one more, so that stages differ, where there are more microbatches than ranks of pp."""
        uneven = self.plan.num_microbatches > self.plan.pp > 1
        return max(2, self.plan.num_stages + uneven)

    @property
    def config(self) -> Config:
        """The sizes; the number of layers follows the stages."""
        return config_of(self.model, self.num_layers)

    def __str__(self) -> str:
        flags = ("sequence_parallel", "recompute", "overlap", "experts_in_data")
        chosen = [name for name in flags if getattr(self.plan, name)]
        return ", ".join([f"{self.model} of {self.num_layers} layers: {self.plan}", *chosen])


def config_of(model: str, num_layers: int) -> Config:
    """The tiny model."""
    if model == "llama":
        return models.LlamaConfig(**SIZES, num_layers=num_layers)
    experts = {"expert_ffn_size": 8, "num_experts": 8, "num_groups": 4, "balance": 1e-2}
    return models.V3MoEConfig(**SIZES, **experts, num_layers=num_layers)


def cases(num_ranks: int = 8) -> Iterator[Case]:
    """Every legal plan of so many ranks for both models; its other settings change from one plan to the next."""
    for model in ("llama", "v3"):
        settings = {"num_microbatches": 2 * num_ranks, "precision": "float64"}
        config = config_of(model, MOST_LAYERS)
        every = lab.Plan.all(config, num_ranks, OPTIONS["sequence_length"], **settings)
        for number, plan in enumerate(every):
            case = Case(model, varied(short(plan, number), config, number))
            yield case
            overlapped = replace(case.plan, overlap=True)
            if case.plan.zero == 3 and number % 2 == 1 and is_legal(overlapped, config):
                yield Case(model, overlapped)


def short(plan: lab.Plan, number: int) -> lab.Plan:
    """The plan with as few microbatches as its schedule allows; every fourth has two for each rank of pp."""
    fewest, more = replace(plan, num_microbatches=max(plan.pp, 2)), replace(plan, num_microbatches=2 * plan.pp)
    try:
        _ = fewest.program
    except ValueError:  # DualPipe needs two for each rank
        return more
    return fewest if number % 4 and fewest.has_pairs == more.has_pairs else more


def varied(plan: lab.Plan, config: Config, number: int) -> lab.Plan:
    """The plan with those of the other settings that its number says and that are legal."""
    settings = {
        "sequence_parallel": plan.tp > 1 and number % 2 == 0,
        "recompute": number % 3 == 0,
        "layout": ("zigzag", "striped", "contiguous")[number % 3] if plan.cp > 1 else plan.layout,
        "overlap": number % 2 == 1 and plan.zero < 3,  # with ZeRO-3 it is a case of its own
    }
    for name, value in settings.items():
        changed = replace(plan, **{name: value})
        plan = changed if is_legal(changed, config) else plan
    return plan


def is_legal(plan: lab.Plan, config: Config) -> bool:
    """Whether a plan fits a model."""
    try:
        plan.check(config, OPTIONS["sequence_length"])
    except ValueError:
        return False
    return True


@cache
def expected(model: str, num_layers: int) -> train.Result:
    """The same training in one process, once for each number of layers."""
    torch.set_num_threads(1)  # tensors of a few hundred numbers: threads only wait for one another
    return train.reference(config_of(model, num_layers), data.frozen_corpus(), STEPS, **OPTIONS)


def references(chosen: Sequence[Case]) -> dict[tuple[str, int], train.Result]:
    """What the ranks compare with, for the models of some cases."""
    return {key: expected(*key) for key in {(case.model, case.num_layers) for case in chosen}}


def prove_all(
    rank: int,
    world_size: int,
    chosen: Sequence[Case],
    right: dict[tuple[str, int], train.Result],
    file: str | None = None,
) -> list[Errors]:
    """In a rank: train under each plan, one after the other; the worst errors of all ranks.

    Rank 0 appends a line of JSON to the file for each plan.
    """
    found = []
    for case in chosen:
        every: list[Errors] = lab.comm.all_gather_object(prove(case, right[case.model, case.num_layers]))
        found.append(together(every))
        if file and rank == 0:
            with Path(file).open("a") as lines:
                lines.write(json.dumps({"case": str(case), **found[-1]}) + "\n")
    return found


def together(every: Sequence[Errors]) -> Errors:
    """The worst of all ranks, and what they hold of the model in all."""
    worst: Errors = {name: max(errors[name] for errors in every) for name in LIMITS}
    names = set().union(*(errors["names"] for errors in every))
    if len(names) != every[0]["num_names"]:
        worst["gradients"] = float("inf")
    worst["cpu"] = round(sum(errors["cpu"] for errors in every), 2)
    calls = [errors["calls"] for errors in every]
    worst["traffic"] = all(measured == predicted for measured, predicted in calls)
    return worst


def prove(case: Case, right: train.Result) -> Errors:
    """In a rank: this rank's errors under one plan, and its calls in one step beside the predicted ones."""
    snapshots: list[Any] = []
    began = process_time()
    trainer = train.Trainer(
        case.config, case.plan, train.TrainOptions(**OPTIONS), lambda: bool(snapshots.append(calls()))
    )  # asked when the step is complete, before the metrics are exchanged
    sampler, gradients = trainer.options.sampler(data.frozen_corpus()), Spy(trainer)
    rows, before = [], {}
    for step in range(STEPS):
        gradients.wanted, gradients.counted = step in (0, STEPS - 1), step == COUNTED
        before = calls() if step == COUNTED else before
        rows.append(trainer.step(trainer.batch(sampler)))
    with trainer.optimizer.gathered():
        weights = {parameter: parameter.detach().clone() for parameter in trainer.optimizer.names}
    pairs = list(zip(rows, right.metrics, strict=True))
    return {
        "gradients": max(map(trainer_distance(trainer), gradients.found, right.gradients)),
        "loss": max(abs(row.loss / other.loss - 1) for row, other in pairs),
        "norm": max(abs(row.norm / other.norm - 1) for row, other in pairs),
        "weights": trainer_distance(trainer)(weights, right.weights()),
        "names": sorted(declared.name for declared in trainer.optimizer.spec.parameters.values()),
        "num_names": len(right.weights()),
        "cpu": process_time() - began,
        "calls": traffic(case, before, snapshots[COUNTED], gradients.routing()),
    }


class Spy:
    """Gathers the raw gradients of a trainer before its optimizer clips them, in the steps that want them.

    In the step that is counted it notes how many of this rank's tokens chose each expert.
    """

    def __init__(self, trainer: train.Trainer) -> None:
        self.found: list[dict[torch.nn.Parameter, Tensor]] = []
        self.wanted = self.counted = False
        self._loads: dict[tuple[int, int], list[int]] = {}
        self._stages = trainer.model.stages
        self._optimizer, self._step = trainer.optimizer, trainer.optimizer.step
        trainer.optimizer.step = self.step

    def step(self, **options: Any) -> Any:
        """Gather, and step."""
        if self.wanted:
            found = dp.full_gradients(self._optimizer)
            self.found.append({parameter: found[name] for parameter, name in self._optimizer.names.items()})
        if self.counted:
            rank = lab.rank_context().rank
            layers = [pair for stage in self._stages.values() for pair in stage.layers.named_children()]
            routers = {int(number): layer.mlp.router for number, layer in layers if hasattr(layer.mlp, "router")}
            self._loads = {(rank, number): router.load.tolist() for number, router in routers.items()}
        return self._step(**options)

    def routing(self) -> dict[tuple[int, int], list[int]]:
        """The counts of all ranks, by rank and layer; every rank calls this."""
        return {key: load for loads in lab.comm.all_gather_object(self._loads) for key, load in loads.items()}


def trainer_distance(trainer: train.Trainer) -> Callable[..., float]:
    """A function from a rank's tensors and the full ones to their largest distance, relative to the largest element."""
    declared = trainer.optimizer.spec.parameters

    def distance(found: dict[torch.nn.Parameter, Tensor], full: dict[str, Tensor]) -> float:
        far = []
        for parameter, tensor in found.items():
            name, shard = declared[parameter].name, declared[parameter].shard
            part = full[name] if shard is None else full[name].narrow(shard.axis, shard.start, shard.stop - shard.start)
            far.append(float((tensor.view(part.shape) - part).abs().max()) if part.numel() else 0.0)
        return max(far) / max(float(tensor.abs().max()) for tensor in full.values())

    return distance


def calls() -> dict[str, tuple[int, int, int]]:
    """This rank's calls so far: their number, bytes sent and bytes received, by operation."""
    entries = lab.rank_context().recorder.flush().ledger.entries
    return {name: (entry.count, entry.sent, entry.received) for name, entry in entries.items()}


def traffic(
    case: Case, before: dict[str, Any], after: dict[str, Any], routing: dict[tuple[int, int], list[int]]
) -> tuple[Any, Any]:
    """This rank's calls in a step, and those that the plan predicts."""
    spent = {
        name: tuple(b - a for a, b in zip(before.get(name, (0, 0, 0)), entry, strict=True))
        for name, entry in after.items()
    }
    step = case.plan.traffic(case.config, OPTIONS["global_batch"], OPTIONS["sequence_length"], routing)
    return {name: entry for name, entry in sorted(spent.items()) if entry[0]}, step.calls(lab.rank_context().rank)


def problems(errors: Errors) -> list[str]:
    """What is beyond the limits, in words; nothing where all is well."""
    found = [f"{name} off by {errors[name]:.1e}" for name, limit in LIMITS.items() if not errors[name] <= limit]
    return found + (["calls differ from the prediction"] if not errors["traffic"] else [])
