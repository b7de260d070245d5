"""`OwnTrainer`: a model, a loss and batches of the user's own under a plan, for `train.run`.

In: a function from a plan to the stages of a model, a loss, batches (x, y).  Out: what `Trainer` gives.
  rows         batch -> data ranks -> microbatches, all equal; a microbatch's share of the loss is that of its targets,
               so the loss of a step is the mean over the batch, without targets of -100
  equal ranks  every rank builds all stages from one seed and keeps its own, and reads the same batches
Elsewhere: torchtitan registers a `TrainSpec` with a model, a loss and a data loader.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from dualpipe_lab import comm
from dualpipe_lab.dp.checkpoint.reader import Checkpoint
from dualpipe_lab.dp.checkpoint.state import random_state, set_random_state
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.plan import Plan
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime.batch import SharesAmong, checksum, num_elements, split_batch
from dualpipe_lab.pp.runtime.check import shared_parameter
from dualpipe_lab.pp.runtime.runtime import PipelineRuntime
from dualpipe_lab.train.metrics import Metrics, StepMeter, check_csv
from dualpipe_lab.train.options import TrainOptions, check_equal, check_folder
from dualpipe_lab.train.trainer import Trainer, seed_all, seed_of

MakeStages: TypeAlias = Callable[[Plan], Iterable[nn.Module]]
Batches: TypeAlias = Iterable[tuple[Any, Any]] | Callable[[], Iterable[tuple[Any, Any]]]
_OF_OUR_MODELS = (  # what means something for the models of this library alone
    "sequence_length", "global_batch", "batch_growth", "bias_speed", "evaluate_every", "evaluation", "start", "elastic",
)  # fmt: skip
_DROP_LAST = "leave out a smaller last batch, as drop_last=True of a DataLoader does"
_PLANNED = ("layers", "recompute", "loss_chunk", "mtp", "overlap", "sequence_parallel")


class OwnTrainer(Trainer):
    """Trains stages that a function makes; every rank of the plan makes one and calls the same methods.

    Args:
        make_stages: returns all stages of the model, in order.
        plan: how it is trained.
        options: as in `train.run`.
        loss: `loss(output, y)`, the mean over a microbatch, or (sum, count), as for `PipelineRuntime`.
        wants_stop: as in `Trainer`.
    """

    def __init__(
        self,
        make_stages: MakeStages,
        plan: Plan,
        options: TrainOptions,
        loss: Callable[..., Tensor],
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plan, self.options, self._wants_stop = plan, options, wants_stop
        self.mesh = Mesh(plan.topology)
        program = plan.program or schedules.build("1f1b", 1, plan.num_microbatches)
        seed_all(options.seed)
        every = list(make_stages(plan))
        if len(every) != program.num_stages or not all(isinstance(stage, nn.Module) for stage in every):
            raise ValueError(
                f"{plan} has {program.num_stages} stages, and the function returned {len(every)}: "
                f"{', '.join(type(stage).__name__ for stage in every)}; return one module for each"
            )
        if shared := shared_parameter(dict(enumerate(every))):
            raise ValueError(
                f"{shared}, and with {program.num_stages} stages each rank would train its own copy; give each stage a "
                "parameter of its own, train on a plan without pp, or write the loop with runtime.sum_tied"
            )
        here = program.stages_of(self.mesh.rank("pp"))
        self.model = nn.ModuleDict({str(number): every[number] for number in here})
        self._make_optimizer(any(parameter.element_size() == 2 for parameter in self.model.parameters()))
        self.runtime = PipelineRuntime(program, self.model, loss, group=self.mesh.group("pp"))
        self.num_steps, self.should_stop, self._meter = 0, False, StepMeter()

    def step(self, batch: Any) -> Metrics:
        """Train on one batch (x, y) of all data ranks."""
        self._begin()
        number, first = self.plan.num_microbatches, self.data_rank * self.plan.num_microbatches
        try:
            x, y = (split_batch(part, self.plan.data_size * number) for part in batch)
        except ValueError as error:
            if not self.num_steps:
                raise
            raise ValueError(f"step {self.num_steps + 1}: {str(error).partition(';')[0]}; {_DROP_LAST}") from error
        mine = slice(first, first + number)
        result = self.runtime.step(x[mine], y[mine], SharesAmong(y))
        return self._finish(result, sum(map(num_elements, y)))

    def batch(self, sampler: Any, step: int | None = None) -> Any:
        """Return the next batch, the same on every rank."""
        return sampler.next(self.num_steps)

    def _about_model(self) -> dict[str, Any]:
        return {"model": "own"}

    def _update_biases(self, speed: float) -> None:
        """Leave them to the model: it has no routers of this library."""


class OwnBatches:
    """Batches in their order, from the first again when they end; a resumed training leaves out those it has seen."""

    def __init__(self, batches: Batches, seed: int) -> None:
        self._batches, self._seed = batches, seed
        self._taken, self._rounds, self._drawn = 0, -1, 0  # the last: batches of this round
        self._iterator: Iterator[tuple[Any, Any]] = iter(())

    def next(self, step: int) -> tuple[Any, Any]:
        """Return the batch of a step; every rank calls this.

        Raises:
            ValueError: there is none, it is no pair, or two ranks read different ones.
        """
        for _ in range(step + 1 - self._taken):
            batch = self._take()
        self._taken = step + 1
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(
                f"a batch is a pair (x, y), got {type(batch).__name__}; return tensors of two names as one"
            )
        digests = comm.all_gather_object(_digest(batch))
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ValueError(
                f"rank {others[0]} read another batch of step {step + 1} than rank 0, and each rank takes its rows of "
                "one batch; draw the data with a generator of its own seed, not with the rank's"
            )
        return batch[0], batch[1]

    def state(self, step: int) -> dict[str, int]:
        """Return what a checkpoint saves of the data."""
        return {"seed": self._seed, "step": step}

    def _take(self) -> Any:
        before = random_state()  # what shuffles or augments draws from a seed of the round and the batch, on every rank
        try:
            for again in (False, True):
                if again:
                    self._rounds, self._drawn = self._rounds + 1, 0
                seed_all(seed_of(self._seed, {"batch": self._drawn}, self._rounds))
                if again:
                    self._iterator = iter(self._batches() if callable(self._batches) else self._batches)
                for batch in self._iterator:
                    self._drawn += 1
                    return batch
        finally:
            set_random_state(before)
        raise ValueError("the data has no batch; give at least one pair (x, y)")


def check_own(
    make_stages: Any, plan: Any, data: Any, steps: Any, loss: Any, given: Mapping[str, Any], resume: Path | None
) -> None:
    """Refuse, before any process starts, a training of an own model that cannot be; `given` are named arguments."""
    if not isinstance(plan, Plan):
        raise ValueError(f"a training has a Plan, got {type(plan).__name__}; give lab.Plan(...)")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"a training has at least 1 step, got steps={steps!r}")
    if not callable(loss):
        raise ValueError(f"an own model needs its loss, got loss={loss!r}; give loss=a function of (output, y)")
    if (
        isinstance(data, Iterator)
        or not (callable(data) or isinstance(data, Iterable))
        or isinstance(data, bytes | str)
    ):
        raise ValueError(
            f"an own model reads batches (x, y), got {type(data).__name__}; give a list, a loader, or a function that "
            "returns an iterable: each rank reads it from the beginning"
        )
    named = [name for name in _OF_OUR_MODELS if given.get(name)]
    changed = [name for name in _PLANNED if getattr(plan, name) != getattr(Plan(), name)]
    if plan.precision != "float32":
        changed.append("precision")
    if named or changed:
        name, where = (named[0], "run(") if named else (changed[0], "Plan(")
        raise ValueError(f"{where}{name}=) is for the library's models; leave it out, and do it in your own stages")
    _check_last_batch(data, plan, steps)
    if plan.cp > 1:
        raise ValueError(f"{plan} shards sequences, which an own model's batches do not say; use cp=1")
    first = 0
    if resume is not None:
        found = Checkpoint(resume)
        if (found.index.values["config"] or {}).get("model") != "own":
            raise ValueError(f"{resume} has one of the library's models; resume it with its config")
        pairs = {"seed": (found.index.values["sampler"]["seed"], given.get("seed", 0))}
        check_equal(resume, pairs | {"ema": (found.index.values["config"]["ema"], given.get("ema") is not None)})
        first = found.step
        if steps <= first:
            raise ValueError(f"{resume} is of step {first}, got steps={steps}; the training ends at a later step")
    if given.get("csv") is not None:
        check_csv(given["csv"])
    check_folder(given.get("folder"), first, resume)


def _check_last_batch(data: Any, plan: Plan, steps: int) -> None:
    """Refuse a loader whose last batch is smaller and does not split, if the training comes to it."""
    if not isinstance(data, DataLoader) or not data.batch_size or isinstance(data.dataset, IterableDataset):
        return
    parts, rest = plan.data_size * plan.num_microbatches, len(data.sampler) % data.batch_size
    if rest % parts and not data.drop_last and steps >= len(data):
        raise ValueError(
            f"the last batch of the loader has {rest} rows and the others {data.batch_size}, and {rest} rows do not "
            f"split into {parts} microbatches; {_DROP_LAST}"
        )


def _digest(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return checksum(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return crc32(repr([_digest(each) for each in parts]).encode())
