"""`run`: train a model under a plan, from a cell, from a script or under `torchrun`.

Chapter: book/whole/training.  In: a config, a plan, data, a number of steps.  Out: a `Result`.
  before any process   everything is checked; the same message would otherwise come from every rank
  checkpoints          at the end, and every k steps; any plan resumes what any other one saved, with the same curve
Elsewhere: torchtitan `run_train.sh` and `Trainer.train`; Megatron `pretrain`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.dp.checkpoint.folder import name_of
from dualpipe_lab.launch import torchrun
from dualpipe_lab.launch.cluster.environment import cluster
from dualpipe_lab.launch.folder import private_folder
from dualpipe_lab.launch.launcher import launch
from dualpipe_lab.launch.record.step_traces import StepTraces
from dualpipe_lab.plan import Plan
from dualpipe_lab.timeline import Timeline
from dualpipe_lab.train.elastic import agree, fitted, last_checkpoint
from dualpipe_lab.train.generate import generate
from dualpipe_lab.train.interrupt import stop_file
from dualpipe_lab.train.metrics import MetricFiles, Metrics
from dualpipe_lab.train.module_spans import with_modules
from dualpipe_lab.train.options import Config, Data, Options, check, find_checkpoint, named_options, on_nodes
from dualpipe_lab.train.result import Result, read_weights
from dualpipe_lab.train.sampler import Sampler
from dualpipe_lab.train.screen import Screen, append, follow
from dualpipe_lab.train.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """What every rank of a training gets."""

    config: Config
    plan: Plan
    data: Data
    steps: int
    options: Options
    resume: Path | None
    evaluation: Data | None
    keeps_weights: bool
    scratch: Path  # of the process that launched: the rows for its screen, and whether it was interrupted


@dataclass(frozen=True)
class Outcome:
    """What a rank returns; only rank 0 has rows and weights."""

    metrics: list[Metrics]
    checkpoint: Path | None
    interrupted: bool
    state: dict[str, Tensor] | None
    text: str | None


def run(
    config: Config,
    plan: Plan,
    data: Data,
    *,
    steps: int,
    resume: Path | str | None = None,
    evaluation: Data | None = None,
    weights: bool = False,
    elastic: bool = False,
    timeout: float = 86_400,
    backend: str = "gloo",
    **options: Any,
) -> Result:
    """Train a model under a plan, and return its metrics, curve and checkpoint.

    Args:
        config: of the model.
        plan: how it is trained; on several nodes its `ranks_per_node` is read from them where it is None.
        data: a text of which sequences are windows, or documents.
        steps: the step at which the training ends, those of a resumed one included.
        resume: a checkpoint, or a folder of them, of which the last is taken; any plan may have saved it.
        evaluation: data to evaluate with, every `evaluate_every` steps.
        weights: keep the full weights in the result.
        elastic: go on from the last checkpoint of `folder`, if it has one, and in a world of another size than the
            plan's under the nearest legal plan; for scripts that `torchrun --max-restarts` or a scheduler starts again.
        timeout: as in `launch`.
        backend: as in `launch`.
        options: as in `Options`.

    Raises:
        ValueError: a training that cannot be, before any process starts.
        RankError, RankTimeout: as `launch`; the checkpoints that were saved until then are complete.
    """
    __tracebackhide__ = True
    chosen, found = named_options(**options), None if resume is None else find_checkpoint(resume)
    if elastic:
        plan, found = fitted(plan, config, chosen, cluster()), last_checkpoint(chosen, found)
    plan = on_nodes(plan, cluster())
    check(config, plan, data, steps, chosen, found, evaluation, elastic)
    with private_folder() as scratch:  # the next kernel removes what a killed one has left
        job = Job(config, plan, data, steps, chosen, found, evaluation, weights, scratch)
        with stop_file(job.scratch / "stop", job.scratch / "begun"):
            results = _launched(job, timeout, backend)
    first: Outcome = results[0]
    ended = first.checkpoint, first.text, first.interrupted
    last_step = _last_step(results.timeline, f"{plan}{results.clock_note}")
    return Result(str(plan), first.metrics, *ended, last_step, first.state)


def _last_step(timeline: Timeline, title: str) -> Timeline | None:
    """Return the last training step, without the evaluations that follow it; the trace holds nothing older."""
    steps = timeline.steps()
    if not steps:
        return None
    last = with_modules(steps[0], timeline)
    return Timeline(title, last.spans_by_rank, last.messages, timeline.source, timeline.unit)


def _launched(job: Job, timeout: float, backend: str) -> Any:
    __tracebackhide__ = True
    arguments: tuple[Any, ...] = (train_rank, job.plan.world_size, job)
    if torchrun.is_active():
        return launch(*arguments, timeout=timeout, backend=backend)
    with follow(job.scratch / "rows", Screen(job.steps, job.options.log_every)):
        return launch(*arguments, timeout=timeout, backend=backend)


def train_rank(rank: int, world_size: int, job: Job) -> Outcome:
    """Train on one rank; the function that `run` launches."""
    (job.scratch / "begun").touch()
    options, is_temporary = job.options, job.keeps_weights and job.options.folder is None
    if is_temporary:  # the weights travel through a checkpoint, as every plan can write one
        options = replace(options, folder=comm.all_gather_object(job.scratch / "weights")[0])
    trainer = Trainer(job.config, job.plan, options, (job.scratch / "stop").exists)
    agree(job.resume)
    if job.resume is not None:
        trainer.load(job.resume)
    sampler, first = options.sampler(job.data), trainer.num_steps
    rows = _train(trainer, sampler, job, rank)
    saved = None if options.folder is None else _save(trainer, sampler, Path(options.folder), first)
    state = read_weights(saved) if rank == 0 and job.keeps_weights and saved is not None else None
    kept = None if is_temporary else saved
    text = None
    if options.sample is not None:
        text = generate(trainer, options.sample, options.sample_length, options.temperature, options.seed)
    return Outcome(rows if rank == 0 else [], kept, trainer.num_steps < job.steps, state, text)


def _train(trainer: Trainer, sampler: Sampler, job: Job, rank: int) -> list[Metrics]:
    """Step until the last step, or until a rank is asked to stop."""
    rows: list[Metrics] = []
    options, every = trainer.options, job.options.evaluate_every
    evaluation = None if job.evaluation is None else options.sampler(job.evaluation)
    files = (options.csv, options.tensorboard) if rank == 0 else (None, None)
    with (
        MetricFiles(*files, first=trainer.num_steps + 1) as written,
        _shown(job, rank) as show,
        _traced(options) as traced,
    ):
        while trainer.num_steps < job.steps and not trainer.should_stop:
            with traced(trainer.num_steps + 1):
                row = trainer.step(trainer.batch(sampler))
            if evaluation is not None and every is not None and row.step % every == 0:
                row = replace(row, evaluation=trainer.evaluate(evaluation))
            rows.append(row)
            written.write(row)
            show(row)
            if options.save_every is not None and row.step % options.save_every == 0:
                trainer.save(sampler)
    return rows


@contextmanager
def _shown(job: Job, rank: int) -> Iterator[Callable[[Metrics], None]]:
    """How this rank shows a row: rank 0 through the process that launched it, under torchrun itself."""
    if rank:
        yield lambda row: None
    elif torchrun.is_active():
        with Screen(job.steps, job.options.log_every) as screen:
            yield screen.show
    else:
        yield lambda row: append(job.scratch / "rows", row)


@contextmanager
def _traced(options: Options) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """What a step runs in, by its number: it is recorded in a file, if the training has a folder for that."""
    if options.traces is None:
        yield lambda step: nullcontext()
    else:
        with StepTraces(options.traces, options.trace_every) as traces:
            yield traces.step


def _save(trainer: Trainer, sampler: Sampler, folder: Path, first: int) -> Path:
    """Save the last step, unless `save_every` has, or the training went on from it; return the checkpoint's path."""
    path = folder / name_of(trainer.num_steps)
    every = trainer.options.save_every
    is_saved = every is not None and trainer.num_steps % every == 0
    return path if is_saved or 0 < first == trainer.num_steps else trainer.save(sampler)
