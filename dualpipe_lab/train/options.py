"""`TrainOptions`: everything about a training but the model and the plan, and the checks before any process.

Chapter: book/whole/training.  In: numbers, folders.  Out: checked options; one message with a remedy.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from dualpipe_lab.dp.adam import AdamW
from dualpipe_lab.dp.checkpoint.folder import latest, saved_steps
from dualpipe_lab.dp.checkpoint.reader import INDEX, Checkpoint, name_of
from dualpipe_lab.launch.cluster.environment import Environment, cluster
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.pretrained.load import check_form, open_pretrained
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan import Plan
from dualpipe_lab.train.metrics import check_csv
from dualpipe_lab.train.sampler import Sampler, check_vocabulary, microbatch_size
from dualpipe_lab.train.schedule import LRSchedule

_COUNTS = dict.fromkeys(("sequence_length", "global_batch", "evaluate_every", "save_every", "keep", "trace_every"), 1)
_COUNTS["log_every"] = 0
KEPT = "lr", "betas", "eps", "weight_decay", "schedule", "max_norm", "bias_speed"  # by a resume that names no other
_MAY_BE_NONE = ("evaluate_every", "save_every", "keep")
Config: TypeAlias = LlamaConfig | V3MoEConfig
Data: TypeAlias = bytes | Sequence[bytes]


@dataclass(frozen=True)
class TrainOptions:
    """The options of a training.

    A training that is resumed goes on with the checkpoint's `lr`, `betas`, `eps`, `weight_decay`, `schedule`,
    `max_norm` and `bias_speed`, unless its call names another: what is named counts from the next step on.

    Attributes:
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step, over all ranks.
        batch_growth: pairs of a step and the global batch from there on; the number of microbatches stays.
        seed: of the weights, of the data, and of the random numbers of each rank and step.
        lr, betas, eps, weight_decay: of AdamW.
        schedule: the factor of the learning rate.
        max_norm: clip the gradient of the full model to this norm; None for no clipping.
        bias_speed: the change of a router's bias per step (V3).
        ema: decay of a moving average of the weights, which evaluations then use; None for none.
        evaluate_every: evaluate on one batch after every so many steps; None for never.
        start: a published folder whose weights the model begins with; None for weights drawn by the seed.
        folder: where checkpoints are saved, a folder that all hosts share; None for none.
        save_every: save after every so many steps (default: at the end alone).
        keep: the number of checkpoints to keep; None for all.
        csv: a file for the metrics.
        traces: a folder for the traces of the ranks, which `read_traces` merges; None for none.
        trace_every: record one of so many steps.
        log_every: steps between two printed lines; 0 prints none.

    Raises:
        ValueError: a number that has no meaning.
    """

    sequence_length: int = 64
    global_batch: int = 8
    batch_growth: Sequence[tuple[int, int]] = ()
    seed: int = 0
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: LRSchedule = field(default_factory=LRSchedule)
    max_norm: float | None = 1.0
    bias_speed: float = 1e-3
    ema: float | None = None
    evaluate_every: int | None = None
    start: str | Path | None = None
    folder: Path | str | None = None
    save_every: int | None = None
    keep: int | None = None
    csv: str | Path | None = None
    traces: str | Path | None = None
    trace_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        for name, first in _COUNTS.items():
            value = getattr(self, name)
            if not (_is_whole(value) and value >= first) and not (value is None and name in _MAY_BE_NONE):
                raise ValueError(f"{name} counts from {first}, got {value!r}")
        if not _is_whole(self.seed):
            raise ValueError(f"seed is an integer, got {self.seed!r}; runs of one seed start from equal weights")
        if not _is_number(self.bias_speed) or not 0 <= self.bias_speed < inf:
            raise ValueError(f"bias_speed is a finite number of at least 0, got {self.bias_speed!r}")
        if self.max_norm is not None and not (_is_number(self.max_norm) and self.max_norm > 0):
            raise ValueError(f"clipping needs max_norm > 0, got {self.max_norm!r}; use None for no clipping")
        if self.ema is not None and not (_is_number(self.ema) and 0 <= self.ema < 1):
            raise ValueError(f"a moving average needs ema from 0 to below 1, got {self.ema!r}; use None for none")
        self._check_parts()

    def _check_parts(self) -> None:
        AdamW([nn.Parameter(torch.zeros(1))], **self.adamw)  # checks its numbers
        if not isinstance(self.schedule, LRSchedule):
            raise ValueError(f"schedule is of type LRSchedule, got {self.schedule!r}")
        pairs = [pair if isinstance(pair, tuple | list) else () for pair in self.batch_growth]
        are_whole = all(len(pair) == 2 and all(map(_is_whole, pair)) for pair in pairs)
        starts = [pair[0] for pair in pairs] if are_whole else []
        if not are_whole or starts != sorted(set(starts)) or min(starts, default=1) < 1:
            raise ValueError(
                "a batch grows by pairs of a step, one after the other from 1, and the sequences from there on, "
                f"got batch_growth={self.batch_growth}"
            )
        for name in ("save_every", "keep"):
            if getattr(self, name) is not None and self.folder is None:
                raise ValueError(f"{name}={getattr(self, name)} needs a folder to save in; give folder=")

    @property
    def adamw(self) -> dict[str, Any]:
        """The arguments of AdamW."""
        return {name: getattr(self, name) for name in ("lr", "betas", "eps", "weight_decay")}

    def sampler(self, data: Data) -> Sampler:
        """Return the sampler of a text or of documents."""
        return Sampler(data, self.sequence_length, self.global_batch, self.seed, self.batch_growth)


def named_options(**options: Any) -> TrainOptions:
    """Return `TrainOptions`; the error about an unknown name says where it belongs, or which name is like it."""
    known = [each.name for each in fields(TrainOptions)]
    for name in set(options) - set(known):
        homes = {LRSchedule: "schedule=LRSchedule", Plan: "Plan"}
        home = next((call for kind, call in homes.items() if name in {each.name for each in fields(kind)}), None)
        like = get_close_matches(name, known, n=1)
        remedy = f"it has {', '.join(known)}" if home is None else f"give it as {home}({name}=...)"
        raise TypeError(f"a training has no option {name}; {f'use {like[0]}' if like and home is None else remedy}")
    return TrainOptions(**options)


def resumed_options(path: Path, **options: Any) -> TrainOptions:
    """Return the options of a training that goes on from a checkpoint, which says what the call does not name."""
    values = Checkpoint(path).index.values
    saved, groups = values["config"], values["param_groups"] or [{}]
    kept = {name: groups[0][name] for name in KEPT[1:4] if name in groups[0]}  # all that there was before "options"
    kept |= saved.get("options", {}) if isinstance(saved, Mapping) else {}
    if "schedule" in kept:
        kept["schedule"] = LRSchedule(**kept["schedule"])
    if "betas" in kept:
        kept["betas"] = tuple(kept["betas"])
    return named_options(**kept | options)


def check(
    config: Config,
    plan: Plan,
    data: Data,
    steps: int,
    options: TrainOptions,
    resume: Path | None = None,
    evaluation: Data | None = None,
    is_elastic: bool = False,
) -> None:
    """Refuse, before any process starts, a training that cannot be.

    Elastic ranks that are started again may find the checkpoint of the last step: the training has ended then.
    """
    if not isinstance(config, LlamaConfig | V3MoEConfig) or not isinstance(plan, Plan):
        raise ValueError(
            f"a training has the config of a model, a LlamaConfig or a V3MoEConfig, and a Plan, got "
            f"{type(config).__name__} and {type(plan).__name__}; for an own model give a function of the plan and loss="
        )
    started = cluster()
    plan.check(config, options.sequence_length, None if started is None else started.world_size)
    for _, size in ((0, options.global_batch), *options.batch_growth):
        microbatch_size(size, plan.data_size, plan.num_microbatches)
    check_data(config, data, steps, options)
    if options.evaluate_every is not None and evaluation is None:
        raise ValueError(f"evaluate_every={options.evaluate_every} needs data to evaluate with; give evaluation=")
    if options.evaluate_every is None and evaluation is not None:
        raise ValueError("evaluation= is data for every so many steps, got evaluate_every=None; give that number")
    if evaluation is not None:
        options.sampler(evaluation)
    if options.csv is not None:
        check_csv(options.csv)
    if options.start is not None:
        _check_start(options.start, config, plan, resume)
    first = 0 if resume is None else _check_resumed(resume, config, plan, options, steps, is_elastic)
    check_folder(options.folder, first, resume)


def on_nodes(plan: Plan, started: Environment | None) -> Plan:
    """Return the plan with the ranks per node of a world that a starter has started on several nodes."""
    if started is None or (started.num_nodes or 1) == 1 or not isinstance(plan, Plan):
        return plan
    found = started.ranks_per_node if started.has_equal_nodes else None
    if plan.ranks_per_node not in (None, found):
        number = "unequal numbers of ranks, or in another order" if found is None else found
        raise ValueError(
            f"the plan names ranks_per_node={plan.ranks_per_node}, and the {started.num_nodes} nodes that "
            f"{started.starter} started have {number}; leave it out, and it is read from the nodes"
        )
    return plan if found is None else replace(plan, ranks_per_node=found)


def _check_start(path: str | Path, config: Config, plan: Plan, resume: Path | None) -> None:
    """Refuse a published folder of another model; only its headers are read."""
    if resume is not None:
        raise ValueError(
            f"a training begins with start={path} or goes on from resume={resume}, got both; leave one out"
        )
    if plan.mtp is not None:
        raise ValueError(
            f"a published folder is read without the layer of a second token, got start={path} and "
            f"mtp={plan.mtp}; leave one of them out"
        )
    open_pretrained(path, check_form(config))


def check_data(config: Config, data: Data, steps: int, options: TrainOptions) -> None:
    """Refuse a number of steps, a vocabulary or a corpus with which no model can be trained."""
    if not _is_whole(steps) or steps < 1:
        raise ValueError(f"a training has at least 1 step, got steps={steps!r}")
    check_vocabulary(config.vocabulary_size)
    options.sampler(data)


def find_checkpoint(path: Path | str) -> Path:
    """Return `path` if it is a checkpoint, or else the checkpoint with the highest step in it."""
    return Path(path) if (Path(path) / INDEX).is_file() else latest(path)


def _check_resumed(path: Path, config: Config, plan: Plan, options: TrainOptions, steps: int, is_elastic: bool) -> int:
    """Refuse a checkpoint of another training; return its step."""
    checkpoint = Checkpoint(path)
    saved = checkpoint.index.values["config"]
    if not isinstance(saved, Mapping) or "model" not in saved:
        raise ValueError(f"{path} was not saved by train.run; load it with dp.checkpoint.load")
    if "plan" not in saved:
        raise ValueError(f"{path} has converted weights and no state of a training; begin with the published folder")
    _check_config(path, saved, config)
    pairs: dict[str, tuple[Any, Any]] = {"ema": (saved["ema"], options.ema is not None)}
    precisions = saved["plan"]["precision"], plan.precision
    pairs["precision"] = ("", "") if "float64" not in precisions else precisions
    lambdas = saved["plan"].get("mtp"), plan.mtp
    pairs["mtp"] = lambdas if None in lambdas else (0, 0)  # another weight is no other model
    position = checkpoint.index.values["sampler"]
    pairs |= {name: (position[name], getattr(options, name)) for name in ("seed", "sequence_length", "global_batch")}
    pairs["batch_growth"] = position.get("batch_growth", []), [list(pair) for pair in options.batch_growth]
    check_equal(path, pairs)
    if steps <= checkpoint.step and not (is_elastic and steps == checkpoint.step):
        raise ValueError(f"{path} is of step {checkpoint.step}, got steps={steps}; the training ends at a later step")
    return int(checkpoint.step)


def _check_config(path: Path, saved: Mapping[str, Any], config: Config) -> None:
    """Refuse the checkpoint of another model; `saved` is what `Trainer.save` wrote of its training."""
    pairs: dict[str, tuple[Any, Any]] = {"model": (saved["model"], type(config).__name__)}
    given = asdict(config)
    there = asdict(type(config)()) | saved["config"]  # one saved before a field was there has its default
    check_equal(path, pairs | {name: (there.get(name), given.get(name)) for name in given | there})


def check_equal(path: Path, pairs: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse a checkpoint that was saved with other values; `pairs` are by name that of the checkpoint and ours."""
    for name, (there, here) in pairs.items():
        if there != here:
            raise ValueError(f"{path} was saved with {name}={there}, got {name}={here}; use it with {name}={there}")


def check_folder(folder: Path | str | None, first: int, resume: Path | None) -> None:
    """Refuse a folder that cannot be written, or that has checkpoints of later steps than `first`."""
    if folder is None:
        return
    above = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"checkpoints are saved in a folder, and {above} is none that can be written; name another")
    later = [step for step in saved_steps(folder) if step > first]
    if later:
        remedy = "resume it (resume=), or save into another folder" if resume is None else "remove them, or resume them"
        raise ValueError(
            f"{folder} has checkpoints of later steps than {first}, such as {name_of(later[-1])}; {remedy}"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
