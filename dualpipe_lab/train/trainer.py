"""`Trainer`: one model under one plan, inside of a rank; `step` is the training step.

Chapter: book/whole/training.  In: a config, a plan, options.  Out: metrics, checkpoints, evaluations, text.
  loss of a step     mean over all valid targets of the step; a rank computes its summand, gradients are summed
  without pp         the microbatches run through the same runtime, on a pipeline of one rank
  random numbers     equal where activations are copies, different where they are not: ranks of tp that drop other units
                     of one copy get gradients of two models; data ranks that drop the same units make fewer masks than
                     there are sequences.  They follow from seed, step and coordinates, so a resumed run draws the same
Elsewhere: torchtitan `Trainer.train_step`; Megatron `training.train_step`, `model_parallel_cuda_manual_seed` (seed +
100 pp_rank; data ranks draw the same unless `--data-parallel-random-init`); torch `OffsetBasedRNGTracker`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.dp import checkpoint
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.ema import ShardedEMA
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.ep.deepseek_moe import update_biases
from dualpipe_lab.ep.overlap.stage import overlappable_stage, overlapped_forward_backward
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.models.pretrained.load import load_pretrained
from dualpipe_lab.models.rank_model import RankModel, build_stages
from dualpipe_lab.plan import Plan
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime.batch import StepResult
from dualpipe_lab.pp.runtime.runtime import PipelineRuntime
from dualpipe_lab.pp.runtime.stage import Stage, run_pair_serially
from dualpipe_lab.topology import RankCoordinates
from dualpipe_lab.train.metrics import Metrics, Reading, StepMeter, bubble_fraction, exchange
from dualpipe_lab.train.options import KEPT, Config, TrainOptions
from dualpipe_lab.train.sampler import Batch, Sampler

OPTIMIZERS: tuple[Callable[..., DDP | Zero1 | Zero2 | Zero3], ...] = (DDP, Zero1, Zero2, Zero3)  # by the stage of ZeRO


class Trainer:
    """Trains one model under one plan; every rank of the plan makes one and calls the same methods.

    Args:
        config: sizes of the model.
        plan: how it is trained.
        options: everything else.
        wants_stop: asked once per step; if any rank's says yes, the step's `should_stop` is True on all.

    Attributes:
        mesh, model, optimizer, runtime: the parts.
        num_steps: steps so far, those of a checkpoint included.
        should_stop: whether a rank was asked to stop.
    """

    def __init__(
        self, config: Config, plan: Plan, options: TrainOptions, wants_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.config, self.plan, self.options, self._wants_stop = config, plan, options, wants_stop
        self.mesh = Mesh(plan.topology)
        program = plan.program or schedules.build("1f1b", 1, plan.num_microbatches)
        self.layout = make_layout(plan.layout, options.sequence_length, plan.cp) if plan.cp > 1 else None
        self.model = build_stages(
            config,
            self.mesh,
            plan.program,
            layers=plan.layers,
            seed=options.seed,
            dtype=getattr(torch, plan.precision),
            sequence_parallel=plan.sequence_parallel,
            layout=self.layout,
            recompute=plan.recompute,
            loss_chunk=plan.loss_chunk,
            mtp=plan.mtp,
        )
        if options.start is not None:  # before the optimizer copies the weights
            load_pretrained(self.model, options.start)
        units = {"units": _units(self.model, plan.overlap)} if plan.zero == 3 else {}
        self._make_optimizer(plan.precision == "bfloat16", **units)
        self.loss_fn = self.model.loss_fn()
        stages: Mapping[int, Stage] = self.model.stages
        if plan.overlap:  # in pieces, so that the all-to-alls of one half of a pair run beside the other half
            stages = {number: overlappable_stage(stage, number) for number, stage in stages.items()}
        self.runtime = PipelineRuntime(
            program,
            stages,
            self.loss_fn,
            group=self.mesh.group("pp"),
            overlapped=overlapped_forward_backward if plan.overlap else run_pair_serially,
        )
        self.num_steps, self.should_stop, self._meter = 0, False, StepMeter()

    def _make_optimizer(self, narrow: bool, **units: Any) -> None:
        """Make optimizer and moving average; `narrow` weights, of 16 bits, have fp32 masters and gradients."""
        self.optimizer = OPTIMIZERS[self.plan.zero](
            self.model,
            self.mesh,
            **units,
            **self.options.adamw,
            max_norm=self.options.max_norm,
            master=narrow,
            grad_dtype=torch.float32 if narrow else None,
            hybrid=self.plan.hybrid,
            program=self.plan.program,
            reduce="sum",  # every rank's loss is its summand of the step's
        )
        self.ema = None if self.options.ema is None else ShardedEMA(self.optimizer, self.options.ema)

    def step(self, batch: Batch) -> Metrics:
        """Train on one batch: forwards and backwards, sums, clipping, update."""
        self._begin()
        self.model.begin_step(batch.num_tokens, batch.num_sequences)

        next_ids, next_targets = (batch.next_inputs, batch.next_targets) if self.model.mtp else ([], [])
        extra = self.model.extra_inputs(next_ids, next_targets, batch.padding)
        result = self.runtime.step(batch.inputs, batch.targets, extra=extra, reduce="sum")
        return self._finish(result, batch.num_tokens)

    def _begin(self) -> None:
        """Start a step: its clock, random numbers, learning rate, and gradients of zero."""
        self._meter.start()
        seed_ranks(self.options.seed, self.mesh, self.num_steps)  # for modules that draw, such as dropout
        (group,) = self.optimizer.param_groups
        lr = self.options.lr * self.options.schedule.factor(self.num_steps)
        group.update(self.options.adamw | {"lr": lr})  # those of a checkpoint are in the options, or were named anew
        self.optimizer.zero_grad()

    def _finish(self, result: StepResult, num_tokens: int) -> Metrics:
        """Update the weights after the last backward, and exchange what the ranks have measured."""
        report = self.optimizer.step()
        self._update_biases(self.options.bias_speed if report.stepped else 0.0)  # without an update none moves
        if self.ema is not None and report.stepped:
            self.ema.update()
        self.num_steps += 1

        loss = self._summand([*result.losses.values(), *result.stage_losses.values()])
        readings = exchange(self._meter.stop(loss, self._wants_stop()))
        self.should_stop = any(reading.wants_stop for reading in readings)
        lr = self.optimizer.param_groups[0]["lr"]
        return self._metrics(readings, num_tokens, report.norm, lr, report.stepped)

    @property
    def data_rank(self) -> int:
        """This rank's number among those with sequences of their own."""
        here = self.mesh.coordinates
        return here.get("dp", 0) * (self.plan.ep if self.plan.has_ep_axis else 1) + here.get("ep", 0)

    def batch(self, sampler: Sampler, step: int | None = None) -> Batch:
        """Return this rank's microbatches of a step (default: the next one)."""
        step, plan = self.num_steps if step is None else step, self.plan
        places = self.data_rank, plan.data_size, self.layout, self.mesh.rank("cp")
        return sampler.batch(step, plan.num_microbatches, *places, mtp=self.model.mtp)

    def evaluate(self, sampler: Sampler) -> float:
        """Return the mean loss per token of a sampler's first batch, with the averaged weights if there are any.

        Only the loss of the next token counts: the balance loss and a second token's loss are left out, and the layer
        that predicts the second token does not run.  Every rank calls this.
        """
        batch = self.batch(sampler, 0)
        self.model.begin_step(1, batch.num_sequences)  # a divisor of 1: sums, not means
        with self.optimizer.gathered(), self.ema.applied() if self.ema is not None else nullcontext(), torch.no_grad():
            outputs = self.outputs(batch.inputs, batch.padding).items()
            losses = [self.loss_fn(output, batch.targets[m]) for m, output in outputs]  # of the last stage alone
            total = torch.tensor([self._summand(losses)], dtype=torch.float64, device="cpu")
        comm.all_reduce(total)
        return float(total) / batch.num_tokens

    def outputs(self, inputs: list[Tensor], padding: Sequence[Tensor] = ()) -> dict[int, Any]:
        """Return what the loss takes of each microbatch whose last stage is on this rank; every rank calls this."""
        self.model.eval()
        try:
            extra = self.model.extra_inputs(padding=padding)
            found: dict[int, Any] = self.runtime.evaluate(inputs, extra=extra).outputs
        finally:
            self.model.train()
        return found

    def save(self, sampler: Any) -> Path:
        """Save a checkpoint of this step into the options' folder, and return its path; every rank calls this."""
        assert self.options.folder is not None
        kept = {name: value for name, value in asdict(self.options).items() if name in KEPT}
        return checkpoint.save(
            self.options.folder,
            self.num_steps,
            self.optimizer,
            sampler=sampler.state(self.num_steps),
            config={**self._about_model(), "plan": self.plan.describe(), "ema": self.ema is not None, "options": kept},
            topology=self.mesh.topology,
            keep=self.options.keep,
        )

    def _about_model(self) -> dict[str, Any]:
        return {"model": type(self.config).__name__, "config": asdict(self.config)}

    def load(self, path: Path) -> None:
        """Go on from a checkpoint that any plan saved; every rank calls this."""
        self.num_steps = checkpoint.load(path, self.optimizer).step

    def _update_biases(self, speed: float) -> None:
        axes = [axis for axis in ("dp", "ep", "cp") if axis in self.mesh.topology.names]
        groups = self.mesh.group(*axes), self.mesh.group("pp")
        update_biases(self.model.stages, speed, groups[0], self.plan.program, groups[1])

    def _summand(self, losses: list[Tensor]) -> float:
        """Return this rank's part of the step's loss; ranks of tp compute the same one, and the first counts it."""
        return float(sum(float(loss) for loss in losses)) if self.mesh.rank("tp") == 0 else 0.0

    def _metrics(
        self, readings: list[Reading], num_tokens: int, norm: float | None, lr: float, stepped: bool
    ) -> Metrics:
        seconds = max(reading.seconds for reading in readings)
        return Metrics(
            self.num_steps,
            sum(reading.loss for reading in readings),
            norm,
            lr,
            num_tokens / seconds if seconds else 0.0,
            bubble_fraction(readings),
            tuple(int(reading.sent_bytes) for reading in readings),
            tuple(int(reading.peak_bytes) for reading in readings),
            stepped,
        )


def _units(model: RankModel, overlap: bool) -> list[nn.Module]:
    """Return what ZeRO-3 gathers at a time: embedding, layers, norm and head.

    A stage is one unit if it ties two of them, runs in pieces, or predicts a second token and so uses its head twice.
    """
    units: list[nn.Module] = []
    for stage in model.stages.values():
        parts = [part for part in (stage.embedding, *stage.layers, stage.norm, stage.head) if part is not None]
        held = [parameter for part in parts for parameter in part.parameters()]
        is_one = len(held) > len(set(held)) or overlap or hasattr(stage, "mtp")
        units += [stage] if is_one else parts
    return units


def seed_ranks(seed: int, here: RankCoordinates, step: int = 0) -> None:
    """Seed all generators for a step: ranks of a tp group draw the same numbers, others do not."""
    seed_all(seed_of(seed, {axis: number for axis, number in here.coordinates.items() if axis != "tp"}, step))


def seed_all(seed: int) -> None:
    """Seed the generators that draw without being named: Python's, numpy's and torch's."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed([seed >> shift & 0xFFFFFFFF for shift in (0, 32)])  # its seeds are words of 32 bits


def seed_of(seed: int, coordinates: Mapping[str, int], step: int = 0) -> int:
    """Return a seed of 64 bits for a rank; an axis of size 1 may be left out.

    Sums such as seed + 100 pp_rank + tp_rank give one seed to two ranks, or to ranks of two runs; this does not.
    """
    places = sorted((axis, number) for axis, number in coordinates.items() if number)
    return int.from_bytes(blake2b(repr((seed, step, places)).encode(), digest_size=8).digest(), "little")
