"""Ten defects that real systems shipped, each planted in a training run by replacing one of the run's methods.

Chapter: book/whole/museum.  In: a run of `training_run`.  Out: the same run with one defect; `DEFECTS` lists them.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dualpipe_course.whole.model_parallel_run import ContextParallel, Pipeline, TensorRanks
from dualpipe_course.whole.training_log import (
    BYTES,
    COPIES,
    CURVE,
    FIRST_LOSS,
    MEMORY,
    NORM,
    TIME,
    TWINS,
    Log,
    RankLog,
)
from dualpipe_course.whole.training_run import (
    LINK,
    MICROBATCHES,
    STEPS,
    DataParallel,
    FullySharded,
    Microbatch,
    Resumed,
    TrainingRun,
)
from dualpipe_lab import comm, cp, dp
from dualpipe_lab.launch.launcher import launch
from dualpipe_lab.timeline import Timeline


class MeanOfMeans(DataParallel):
    """Each microbatch is divided by its own number of targets, and the means are averaged."""

    def loss(self, ids: Tensor, targets: Tensor, total: int) -> Tensor:
        """Divide by what is here."""
        own = int((targets != dp.IGNORE_INDEX).sum())
        return super().loss(ids, targets, own * MICROBATCHES * comm.get_world_size(self.data))


class SameBatches(DataParallel):
    """Every data rank reads the first rank's share."""

    def data_rank(self) -> int:
        """The first, on every rank."""
        return 0


class SumEveryMicrobatch(DataParallel):
    """Gradients are summed over the ranks after each microbatch, and the sums are added up."""

    kept: list[Tensor] | None = None

    def backward(self, share: Tensor) -> None:
        """Add the gradients, and sum them at once."""
        super().backward(share)
        new = [flat.clone() for flat in self.ddp.reducer.finish()]
        self.kept = new if self.kept is None else [old + grad for old, grad in zip(self.kept, new, strict=True)]
        self.ddp.zero_grad()

    def sum_gradients(self) -> None:
        """The sums are there already."""

    def norm(self) -> float:
        """The norm of the sums."""
        return self.ddp.updater.norm(self.kept or [], 2.0) / self.scaler.scale

    def update(self, norm: float) -> None:
        """Unscale, clip and update."""
        self.ddp.updater.update(self.kept or [], max_norm=self.max_norm, scaler=self.scaler)
        self.kept = None


class OneBucket(DataParallel):
    """One bucket holds all gradients, so their sum begins when the backward is over."""

    bucket_bytes = 2**30


class ClipScaled(DataParallel):
    """The gradient is clipped while the loss scale is still in it."""

    def norm(self) -> float:
        """The norm with the loss scale in it."""
        return self.ddp.grad_norm()

    def update(self, norm: float) -> None:
        """Clip, then unscale and update."""
        for flat in self.ddp.finished_gradients():
            flat *= dp.clip_factor(norm, self.max_norm)
        self.ddp.step(scaler=self.scaler)
        self.ddp.zero_grad()


class StaleMasters(Resumed):
    """A load of weights leaves the optimizer's fp32 masters as they were."""

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take the weights, and nothing else."""
        self.known = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.model.load_state_dict(weights)

    def update(self, norm: float) -> None:
        """Update the weights that the masters were made from: the library's optimizer would see that others came."""
        for name, parameter in self.model.named_parameters():
            if name in self.known:
                parameter.data.copy_(self.known.pop(name))
        super().update(norm)


class KeptUnits(FullySharded):
    """The full weights of a unit are not freed after its forward."""

    reshard_after_forward = False


class KeyCopiesApart(TensorRanks):
    """The gradients of a KV head's copies are not summed; each copy sees its rank's query heads alone."""

    def sum_gradients(self) -> None:
        """Left out."""


class OwnKeysAgain(ContextParallel):
    """In the backward of ring attention every block is computed with the keys and values of the rank itself."""

    def kernel(self) -> cp.Kernel:
        """A kernel that forgets the other ranks' keys."""
        return _OwnKeys()


class _OwnKeys(cp.FlashTiles):
    """The kernel of one call of ring attention; the rank's own block comes first."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offset: int | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        first: tuple[Tensor, Tensor] = self.__dict__.setdefault("first", (k, v))
        k, v = (own[:, :, : k.shape[2]] for own in first)
        return super().backward(grad, q, k, v, out, lse, offset, scale)


class UndividedPipeline(Pipeline):
    """The pipeline starts its backwards from the sum of the losses; only the log is divided by the targets."""

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum, undivided."""
        return dp.token_loss(logits, targets, 1)

    def accumulate(self, batch: list[Microbatch]) -> Tensor:
        """Run the program, and divide the loss afterwards."""
        return super().accumulate(batch) / self.total


@dataclass(frozen=True)
class Defect:
    """One piece of the museum.

    Attributes:
        run: the run with the defect; its base class is the sound run.
        shows: the symptoms against the sound run.
        told: what was reported of a real system.
        sources: where, looked up in November 2026.
    """

    run: type[TrainingRun]
    shows: frozenset[str]
    told: str
    sources: tuple[str, ...]

    @property
    def sound(self) -> type[TrainingRun]:
        """The run without the defect."""
        return self.run.__bases__[0]

    def answer(self) -> str:
        """What is wrong, the method that differs, and the report."""
        methods = inspect.getsource(self.run).partition('"""\n')[2].strip("\n")
        return "\n\n".join([f"{self.run.__name__}: {self.run.__doc__}", methods, self.told, *self.sources])


def _defect(run: type[TrainingRun], shows: set[str], told: str, *sources: str) -> Defect:
    return Defect(run, frozenset(shows), told, tuple(f"https://github.com/{source}" for source in sources))


DEFECTS = (
    _defect(
        MeanOfMeans,
        {FIRST_LOSS, CURVE, NORM},
        "Hugging Face transformers, repaired in October 2024: with gradient accumulation the means of microbatches\n"
        "were averaged, so a target in a short microbatch weighed more than one in a long microbatch.",
        "huggingface/transformers/pull/34191",
    ),
    _defect(
        SameBatches,
        {FIRST_LOSS, CURVE, NORM, TWINS},
        "Stanford's mistral, 2022: a trainer overrode the method that gives each process its share of the data.\n"
        "All processes read the same examples, and data parallelism gained nothing.",
        "stanford-crfm/mistral/issues/194",
    ),
    _defect(
        SumEveryMicrobatch,
        {BYTES, TIME},
        "NVIDIA's cosmos-framework, 2026: the switch that defers the sums knew DDP and did nothing under FSDP2.\n"
        "A step of 4 microbatches took 4 times as long as a step of 1; with the repair 54.3 s instead of 22.2 s.",
        "NVIDIA/cosmos-framework/issues/161",
    ),
    _defect(
        OneBucket,
        {TIME},
        "NVIDIA apex, 2018: a profile of ResNet-50 showed the first all-reduce after the last kernel of the\n"
        "backward, although the user had asked for overlap.",
        "NVIDIA/apex/issues/33",
    ),
    _defect(
        ClipScaled,
        {NORM, CURVE},
        "PyTorch Lightning, 2021: the clip ran directly after the backward, and the loss scale was divided out only\n"
        "before the update; the reporter saw a very slow convergence. Apex's distributed Adam had the like in 2022.",
        "Lightning-AI/pytorch-lightning/issues/9599",
        "NVIDIA/apex/pull/1512",
    ),
    _defect(
        StaleMasters,
        {CURVE},
        "DeepSpeed, 2021: after a load without optimizer state the fp32 masters were still the random ones, which\n"
        "cost the reporter a month. In 2023 the same was repaired for bf16.",
        "deepspeedai/DeepSpeed/pull/762",
        "deepspeedai/DeepSpeed/pull/4141",
    ),
    _defect(
        KeptUnits,
        {MEMORY, BYTES, TIME},
        "PyTorch FSDP2, 2025: a text encoder's weights stayed gathered after its forward although\n"
        "`reshard_after_forward` was set; a call of `reshard()` by hand freed them.",
        "pytorch/pytorch/issues/149029",
        "pytorch/pytorch/issues/154655",
    ),
    _defect(
        KeyCopiesApart,
        {NORM, CURVE, COPIES, BYTES, TIME},
        "BigCode's Megatron-LM, 2023, with one KV head on several tensor parallel ranks: the validation loss after\n"
        "5,000 steps was 3.74, and 2.64 when the gradients were summed.",
        "bigcode-project/Megatron-LM/pull/37",
    ),
    _defect(
        OwnKeysAgain,
        {NORM, CURVE},
        "Hugging Face diffusers, 2026: each step of the backward recomputed from what the forward had saved in its\n"
        "first step, the rank's own keys and values; the forward was right, and no error was raised.",
        "huggingface/diffusers/issues/14265",
    ),
    _defect(
        UndividedPipeline,
        {NORM, CURVE},
        "PyTorch torchtitan, 2026: without a pipeline the loss was divided by the step's tokens before the backward,\n"
        "with a pipeline only afterwards, for the log.",
        "pytorch/torchtitan/issues/2972",
    ),
)


def records(
    rank: int, world_size: int, runs: Sequence[type[TrainingRun]], first_seed: int = 0, num_steps: int = STEPS
) -> list[RankLog]:
    """Train some runs one after another: what `launch` calls on two ranks, on the virtual clock and `LINK`."""
    return [_record(run, first_seed, num_steps) for run in runs]


def _record(run: type[TrainingRun], first_seed: int, num_steps: int) -> RankLog:
    made = run()
    made.first_seed = first_seed
    return made.train(num_steps)


def train(runs: Sequence[type[TrainingRun]], first_seed: int = 0) -> list[Log]:
    """Train some runs on two ranks and return the log of each; the virtual clock makes it the same everywhere.

    Args:
        runs: classes of runs, sound or defective.
        first_seed: of the data; other data give other numbers and the same symptoms.
    """
    found = launch(records, 2, runs, first_seed, clock="virtual", link=LINK, timeout=120)
    return [Log(ranks) for ranks in zip(*found, strict=True)]


def timeline(run: type[TrainingRun], name: str) -> Timeline:
    """Return both streams of a run's first forwards, backwards and sums, after the broadcast of the weights."""
    found = launch(first_sums, 2, run, clock="virtual", link=LINK).streams
    return Timeline(name, found.spans_by_rank, found.messages, found.source, found.unit)


def first_sums(rank: int, world_size: int, run: type[TrainingRun]) -> None:
    """Compute the first gradients of a run and sum them."""
    made = run()
    made.accumulate(made.batch(0))
    made.sum_gradients()
