"""`run`: train a model under a plan, from a cell, from a script or under `torchrun`.

Chapter: book/whole/training.  In: a config, a plan, data, a number of steps.  Out: a `Result`.
Everything is checked before any process starts: the same message would otherwise come from every rank.
SIGINT (Ctrl-C), SIGTERM (a node is taken away; SIGKILL comes 30 s later) and SIGUSR1 (a time limit comes near: Slurm's
`--signal`) end the training after the step, with a checkpoint; all ranks stop, by the exchange of the metrics.
Elsewhere: torchtitan `run_train.sh` and `Trainer.train`; Megatron `pretrain`; `torchrun --nnodes 1:4 --max-restarts 3`
starts a script again with the ranks that are left; torchft keeps the living ranks and changes their number alone.
"""

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from socket import gethostname
from typing import Any

from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.dp.checkpoint.folder import latest, saved_steps
from dualpipe_lab.dp.checkpoint.reader import CheckpointError, name_of
from dualpipe_lab.dp.checkpoint.session import check_save, gathered_weights
from dualpipe_lab.launch import operating_system, torchrun
from dualpipe_lab.launch.cluster.environment import Environment, cluster
from dualpipe_lab.launch.folder import private_folder
from dualpipe_lab.launch.launcher import launch
from dualpipe_lab.launch.record.step_traces import StepTraces
from dualpipe_lab.plan import Plan
from dualpipe_lab.timeline import Timeline
from dualpipe_lab.train.metrics import Metrics, MetricsFile
from dualpipe_lab.train.options import (
    Config,
    Data,
    TrainOptions,
    check,
    find_checkpoint,
    named_options,
    on_nodes,
    resumed_options,
)
from dualpipe_lab.train.own import Batches, MakeStages, OwnBatches, OwnTrainer, check_own
from dualpipe_lab.train.result import Result, read_weights
from dualpipe_lab.train.trainer import Trainer


@dataclass(frozen=True)
class TrainJob:
    """Arguments that `run` sends to every rank."""

    config: Config | MakeStages
    plan: Plan
    data: Data | Batches
    loss: Callable[..., Tensor] | None
    steps: int
    options: TrainOptions
    resume: Path | None
    evaluation: Data | None
    keeps_weights: bool
    scratch: Path  # of the process that launched: whether it was interrupted


def run(
    config: Config | MakeStages,
    plan: Plan,
    data: Data | Batches,
    *,
    steps: int,
    loss: Callable[..., Tensor] | None = None,
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
        config: of the model; or a function of the plan that returns all stages of an own model, in order.  Each rank
            calls it with the same seed, and keeps the stages that the plan's program gives it.
        plan: how it is trained; on several nodes its `ranks_per_node` is read from them where it is None.
        data: a text of which sequences are windows, or documents; for an own model pairs (x, y) of tensors (or tuples
            and dicts of them) with a row per sample, which data ranks and microbatches share in equal parts: a list, a
            loader, or a function that returns one.  It begins again when it ends.
        steps: the step at which the training ends, those of a resumed one included.
        loss: `loss(output, y)` of an own model, the mean over the elements of `y` but -100; where it is a mean over
            something else, a pair (sum, count).
        resume: a checkpoint, or a folder of them, of which the last is taken; any plan may have saved it.
        evaluation: data to evaluate with, every `evaluate_every` steps.
        weights: keep the full weights in the result.
        elastic: go on from the last checkpoint of `folder`, if it has one, and in a world of another size than the
            plan's under the nearest legal plan; for scripts that `torchrun --max-restarts` or a scheduler starts again.
        timeout: as in `launch`.
        backend: as in `launch`.
        options: as in `TrainOptions`, which says what a resumed training takes from the checkpoint.

    Raises:
        ValueError: a training that cannot be, before any process starts.
        RankError, RankTimeout: as `launch`; the checkpoints that were saved until then are complete.  A model that no
            save could keep is refused before the first step, or after it.  A save that fails later, on a full disk for
            one, ends the training without an error: the result has its metrics, its weights, and `problem`.
    """
    __tracebackhide__ = True
    chosen, found = named_options(**options), None if resume is None else find_checkpoint(resume)
    if elastic and not callable(config):
        plan = plan_for_world(plan, config, chosen, cluster())
        if chosen.folder is None:
            raise ValueError("elastic=True goes on from the training's own checkpoints, got folder=None; give folder=")
        found = latest(chosen.folder) if saved_steps(chosen.folder) else found
    if found is not None:
        chosen = resumed_options(found, **options)
    plan = on_nodes(plan, cluster())
    if callable(config):
        check_own(config, plan, data, steps, loss, options | {"elastic": elastic, "evaluation": evaluation}, found)
    elif loss is not None:
        raise ValueError("loss= is for an own model, and the library's models have theirs; leave it out")
    else:
        check(config, plan, data, steps, chosen, found, evaluation, elastic)  # type: ignore[arg-type]
    with private_folder() as scratch:  # the next kernel removes what a killed one has left
        job = TrainJob(config, plan, data, loss, steps, chosen, found, evaluation, weights, scratch)
        with stop_file(job.scratch / "stop", job.scratch / "begun"):
            results: Any = launch(train_rank, plan.world_size, job, timeout=timeout, backend=backend)
    result: Result = results[0]
    if result.problem is not None and result.metrics:  # of rank 0
        said = f"{result.problem}\nwhat the training made is not lost: its metrics and weights are in the result"
        warnings.warn(said, stacklevel=2)
    timeline = results.timeline
    for last in timeline.steps()[:1]:  # the trace holds the last training step, and evaluations that follow
        title = f"{plan}{results.clock_note}"
        result.timeline = Timeline(title, last.spans_by_rank, last.messages, timeline.source, timeline.unit)
    return result


def plan_for_world(plan: Plan, config: Config, options: TrainOptions, started: Environment | None) -> Plan:
    """Return the plan if its size is that of the started world, or the nearest legal plan of the world's size."""
    if started is None or not isinstance(plan, Plan) or started.world_size == plan.world_size:
        return plan
    batch = gcd(options.global_batch, *(size for _, size in options.batch_growth))  # all of them have to divide
    nearest = plan.nearest(config, options.sequence_length, started.world_size, batch)
    if nearest is None:
        raise ValueError(
            f"{started.world_size} ranks have come instead of the {plan.world_size} of {plan}, and no plan of so many "
            f"fits the model and a global batch of {batch} sequences; start another number of ranks"
        )
    if started.rank == 0:
        come = "1 rank has" if started.world_size == 1 else f"{started.world_size} ranks have"
        print(f"{come} come instead of {plan.world_size}: {nearest} instead of {plan}")
    return nearest


@contextmanager
def stop_file(file: Path, begun: Path) -> Iterator[None]:
    """Make a signal inside of the `with` block create `file`; a second signal, not of torchrun's, stops at once.

    The ranks of `launch` are detached from the terminal, so only the process that launched them gets a signal.  Under
    torchrun every rank of a node gets it, maybe at different steps, and ranks of other nodes do not.  There it stops a
    rank at once as long as `begun` is missing, which says that the ranks have met: nothing is to be saved, and torchrun
    restarts no rank of its node before all have ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def on_signal(number: int, frame: Any) -> None:
        is_second = file.exists() and not torchrun.is_active()  # torchrun repeats the signal by itself
        if is_second or (torchrun.is_active() and not begun.exists()):
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        file.touch()
        started = cluster()
        if started is None or started.local_rank == 0:  # a node without rank 0 may be the one that is taken away
            name = "interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}"
            again = "" if started is not None else "; interrupt again to stop at once"
            print(f"\n{name}: the training stops after this step{again}", flush=True)

    before = {number: signal.signal(number, on_signal) for number in operating_system.STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_agreement(resume: Path | None) -> None:
    """Raise ValueError on every rank if a rank sees another checkpoint than rank 0; every rank calls this."""
    seen = comm.all_gather_object((None if resume is None else str(resume), gethostname()))
    others = [rank for rank, (path, _) in enumerate(seen) if path != seen[0][0]]
    if not others:
        return
    (first, host), (path, other_host) = seen[0], seen[others[0]]
    raise ValueError(
        f"the ranks do not see one folder of checkpoints: rank 0 on {host} goes on from {first or 'none'}, rank "
        f"{others[0]} on {other_host} from {path or 'none'}; give a folder that every host shares"
    )


def train_rank(rank: int, world_size: int, job: TrainJob) -> Result:
    """Train on one rank, and return the result without its timeline; only rank 0 has rows and weights."""
    (job.scratch / "begun").touch()
    options, is_temporary = job.options, job.keeps_weights and job.options.folder is None
    if is_temporary:  # the weights travel through a checkpoint, as every plan can write one
        options = replace(options, folder=comm.all_gather_object(job.scratch / "weights")[0])
    stops = (job.scratch / "stop").exists
    is_own = callable(job.config)
    trainer = (
        OwnTrainer(job.config, job.plan, options, job.loss, stops)  # type: ignore[arg-type]
        if is_own
        else Trainer(job.config, job.plan, options, stops)  # type: ignore[arg-type]
    )
    check_agreement(job.resume)
    if job.resume is not None:
        trainer.load(job.resume)
    sampler: Any = OwnBatches(job.data, options.seed) if is_own else options.sampler(job.data)  # type: ignore[arg-type]
    first = trainer.num_steps
    if options.folder is not None:
        check_save(trainer.optimizer)
    rows, problem = _train(trainer, sampler, job, rank)
    saved = state = None
    if problem is None and options.folder is not None:
        saved, problem = _save(trainer, sampler, Path(options.folder), first)
    if problem is not None:
        state = gathered_weights(trainer.optimizer)
    elif rank == 0 and job.keeps_weights and saved is not None:
        state = read_weights(saved)
    kept, stopped = None if is_temporary else saved, trainer.num_steps < job.steps
    result = Result(str(job.plan), rows, kept, stopped, state=state, problem=problem)
    return result if rank == 0 else replace(result, metrics=[], state=None)


def _train(trainer: Trainer, sampler: Any, job: TrainJob, rank: int) -> tuple[list[Metrics], str | None]:
    """Return the rows, and what a save on the way said if it failed: the training ends then, with its weights."""
    rows: list[Metrics] = []
    problem: str | None = None
    options, every = trainer.options, job.options.evaluate_every
    evaluation = None if job.evaluation is None else options.sampler(job.evaluation)
    written = MetricsFile(options.csv if rank == 0 else None, trainer.num_steps + 1)
    traces = None if options.traces is None else StepTraces(options.traces, options.trace_every)
    with traces or nullcontext():
        while trainer.num_steps < job.steps and not trainer.should_stop and problem is None:
            with nullcontext() if traces is None else traces.step(trainer.num_steps + 1):
                row = trainer.step(trainer.batch(sampler))
            if evaluation is not None and every is not None and row.step % every == 0:
                row = replace(row, evaluation=trainer.evaluate(evaluation))
            rows.append(row)
            written.write(row)
            if rank == 0 and _is_due(row, options.log_every, job.steps):
                print(row, flush=True)  # `launch` and torchrun show what rank 0 prints at once
            if len(rows) == 1 and options.folder is not None and row.step < job.steps:
                check_save(trainer.optimizer)  # what the last save would refuse, before the steps until then are lost
            if options.save_every is not None and row.step % options.save_every == 0:
                _, problem = _try_save(trainer, sampler)
    return rows, problem


def _is_due(row: Metrics, every: int, last: int) -> bool:
    return every > 0 and (row.step % every == 0 or row.step in (1, last) or row.evaluation is not None)


def _save(trainer: Trainer, sampler: Any, folder: Path, first: int) -> tuple[Path | None, str | None]:
    """Save the last step, unless `save_every` has, or the training went on from it; return as `_try_save`."""
    path = folder / name_of(trainer.num_steps)
    every = trainer.options.save_every
    is_saved = every is not None and trainer.num_steps % every == 0
    return (path, None) if is_saved or 0 < first == trainer.num_steps else _try_save(trainer, sampler)


def _try_save(trainer: Trainer, sampler: Any) -> tuple[Path | None, str | None]:
    """Return the path of a checkpoint, or what failed: all ranks get the same, and the training is not lost."""
    try:
        return trainer.save(sampler), None
    except CheckpointError as error:
        return None, str(error)
