"""A small training run on two ranks, in pieces that a defect can replace (a piece is a method), and its data axis.

Chapter: book/whole/museum.  In: two ranks.  Out: a `RankLog`.
  here                    data parallel with a loss scale; ZeRO-1 in bf16 from a checkpoint; ZeRO-3
  model_parallel_run.py   tensor parallel; context parallel; pipeline
Every run reads the same text in float64 (ZeRO-1: bf16), with sequences of unequal length, and clips its gradient.
Layers let the virtual clock pass, so the time of a step is the same on every machine.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from dualpipe_course.meter import Meter
from dualpipe_course.whole.training_log import RankLog
from dualpipe_lab import comm, data, dp, models
from dualpipe_lab.launch.context import compute, span
from dualpipe_lab.launch.emulator import Link
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.topology import Topology

ROWS, LENGTH, MICROBATCHES, STEPS = 8, 16, 2, 8
FORWARD_MS, BACKWARD_MS, LINK = 1, 2, Link(gbps=0.5, latency_ms=0.02)  # of one layer, on the virtual clock
TEXT = b"a rank computes, a link carries, a step ends. " * 8 + b"every gradient is summed once, over every copy. " * 8
LLAMA = models.LlamaConfig(vocabulary_size=128, hidden_size=32, ffn_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
LR = 1e-2

Microbatch = tuple[Tensor, Tensor]


def draw(seed: int) -> Microbatch:
    """Draw a batch for all ranks; sequences end early, and what follows is no target."""
    ids, targets = next(data.batches(ROWS, LENGTH, seed, TEXT))
    for row in range(ROWS):
        targets[row, 2 + 5 * row % 13 :] = dp.IGNORE_INDEX
    return ids, targets


def _pass(kind: str, ms: float) -> None:
    """Let time pass, as a span of the timeline."""
    with span(kind, label=kind):
        compute(ms)


class TrainingRun:
    """A loop of forward, backward, sum, clip, update; subclasses say how the ranks share it."""

    topology = Topology([("dp", 2)])
    data_axes: tuple[str, ...] = ("dp",)
    max_norm = 2.5
    first_seed = 0  # of the data

    def __init__(self) -> None:
        self.mesh = Mesh(self.topology)
        self.data = self.mesh.group(*self.data_axes)
        self.peak = self.held = 0  # bytes of gathered weights
        self.model: nn.Module = self.make_model()
        for layer in self.layers():
            layer.register_forward_hook(lambda *_: _pass("F", FORWARD_MS))
            layer.register_full_backward_pre_hook(lambda *_: _pass("B", BACKWARD_MS))
        self.prepare()

    def train(self, num_steps: int = STEPS) -> RankLog:
        """Train and write the log."""
        log = RankLog()
        for step in range(num_steps):
            meter = Meter()
            loss = self.accumulate(self.batch(step))
            self.sum_gradients()
            norm = self.norm()
            self.update(norm)
            spent = meter.lap()
            log.own_losses.append(float(loss))
            log.losses.append(self.logged(loss))
            log.norms.append(norm)
            log.sent.append(spent.bytes)
            log.times.append(spent.ms)
        log.spread, log.peak = self.spread(), self.peak
        return log

    def make_model(self) -> nn.Module:
        """The model, with this rank's shards."""
        return models.Llama(LLAMA, self.mesh, dtype=torch.float64)

    def layers(self) -> Iterable[nn.Module]:
        """The layers, which let time pass."""
        found: Iterable[nn.Module] = self.model.get_submodule("layers").children()
        return found

    def prepare(self) -> None:
        """Make the optimizer."""
        self.optimizer = dp.AdamW(self.model.parameters(), lr=LR)

    def data_rank(self) -> int:
        """Which share of the batch this rank reads."""
        return comm.get_rank(self.data)

    def batch(self, step: int) -> list[Microbatch]:
        """This rank's microbatches of a step."""
        share = [self.share(part) for part in draw(self.first_seed + step)]
        return list(zip(*(part.chunk(MICROBATCHES) for part in share), strict=True))

    def share(self, full: Tensor) -> Tensor:
        """This rank's share of `full_BS`: some of the sequences."""
        return full.chunk(comm.get_world_size(self.data))[self.data_rank()]

    def accumulate(self, batch: list[Microbatch]) -> Tensor:
        """Run all microbatches forward and backward; return this rank's summand of the loss."""
        total = self.num_tokens(batch)
        loss = torch.zeros((), dtype=torch.float64)
        for ids, targets in batch:
            share = self.loss(ids, targets, total)
            self.backward(share)
            loss += share.detach()
        return loss

    def num_tokens(self, batch: list[Microbatch]) -> int:
        """Number of targets of the step, over all microbatches and data ranks."""
        return dp.num_valid_tokens([targets for _, targets in batch], self.data)

    def loss(self, ids: Tensor, targets: Tensor, total: int) -> Tensor:
        """The summand of a microbatch in the mean over `total` targets."""
        found: Tensor = self.model.loss(ids, targets, num_tokens=total)
        return found

    def logged(self, loss: Tensor) -> float:
        """The loss for the log: the sum of all data ranks' summands."""
        total = loss.clone()
        comm.all_reduce(total, group=self.data)
        return float(total)

    def backward(self, share: Tensor) -> None:
        """Add a microbatch's gradients to those that are there."""
        share.backward()

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks with other data."""
        dp.all_reduce_gradients(self.model.parameters(), self.data)

    def norm(self) -> float:
        """The norm of the full model's gradient."""
        return dp.global_norm([(p.grad, ()) for p in self.model.parameters() if p.grad is not None], {})

    def update(self, norm: float) -> None:
        """Clip by the norm, and update the weights."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= dp.clip_factor(norm, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def copies(self) -> list[Tensor]:
        """Weights of which every rank of this run should hold equal copies."""
        return list(self.model.parameters())

    def spread(self) -> float:
        """The largest difference between copies."""
        worst = 0.0
        for weight in self.copies():
            low, high = weight.detach().clone(), weight.detach().clone()
            comm.all_reduce(low, "min")
            comm.all_reduce(high, "max")
            worst = max(worst, float((high - low).max()))
        return worst


class DataParallel(TrainingRun):
    """Two data ranks with a loss scale, whose sums begin during the backward."""

    bucket_bytes = 64 * 2**10

    def prepare(self) -> None:
        """Make an optimizer that sums gradients during the backward."""
        self.ddp = dp.DDP(
            self.model, self.data, lr=LR, bucket_bytes=self.bucket_bytes, num_backwards=MICROBATCHES, reduce="sum"
        )
        self.scaler = dp.LossScaler(scale=2.0**16)

    def backward(self, share: Tensor) -> None:
        """Add the gradients of the scaled loss."""
        self.scaler.scaled(share).backward()

    def sum_gradients(self) -> None:
        """Wait for the sums."""
        self.ddp.finished_gradients()

    def norm(self) -> float:
        """The norm without the loss scale."""
        return self.ddp.grad_norm() / self.scaler.scale

    def update(self, norm: float) -> None:
        """Unscale, clip and update."""
        self.ddp.step(max_norm=self.max_norm, scaler=self.scaler, norm=norm * self.scaler.scale)
        self.ddp.zero_grad()


class Resumed(TrainingRun):
    """Two data ranks that continue with ZeRO-1 in bf16 from the weights of another run."""

    def make_model(self) -> nn.Module:
        """The model in bf16."""
        return models.Llama(LLAMA, self.mesh, dtype=torch.bfloat16)

    def prepare(self) -> None:
        """Make the optimizer, then load the weights of a sound run."""
        self.zero = dp.Zero1(self.model, self.data, lr=LR, master=True, num_backwards=MICROBATCHES, reduce="sum")
        other = DataParallel()
        other.train()
        self.load(other.model.state_dict())

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of a checkpoint, without its optimizer state."""
        self.model.load_state_dict(weights)
        for shard in self.zero.local_shards:  # the fp32 masters, too: the next update starts from them
            shard.optimizer.weight.copy_(shard.optimizer.working)

    def sum_gradients(self) -> None:
        """Reduce-scatter the gradients."""
        self.zero.finished_gradients()

    def norm(self) -> float:
        """The norm over all shards."""
        return self.zero.grad_norm()

    def update(self, norm: float) -> None:
        """Clip, update this rank's shard, and gather the weights."""
        self.zero.step(max_norm=self.max_norm, norm=norm)
        self.zero.zero_grad()


class FullySharded(TrainingRun):
    """Two data ranks with ZeRO-3."""

    reshard_after_forward = True

    def make_model(self) -> nn.Module:
        """A model of more layers than a rank should hold at once."""
        return models.Llama(replace(LLAMA, num_layers=4), self.mesh, dtype=torch.float64)

    def prepare(self) -> None:
        """Shard the model; its units are the embedding, the layers and the head."""
        units = [self.model.get_submodule("embedding"), *self.layers(), self.model.get_submodule("head")]
        root = self.model.get_submodule("norm")
        self.sizes = [sum(p.nbytes for p in unit.parameters()) for unit in [*units, root]]
        reshard = self.reshard_after_forward
        self.zero = dp.Zero3(
            self.model,
            self.data,
            units=units,
            lr=LR,
            reshard_after_forward=reshard,
            on_change=self.watch,
            reduce="sum",
        )
        self.held = 0  # making the shards has freed all units

    def watch(self, unit: int, is_held: bool) -> None:
        """Take note of the bytes of full weights that are in memory."""
        self.held += self.sizes[unit] if is_held else -self.sizes[unit]
        self.peak = max(self.peak, self.held)

    def sum_gradients(self) -> None:
        """Every backward has reduce-scattered its gradients."""
        self.zero.finished_gradients()

    def norm(self) -> float:
        """The norm over all shards."""
        return self.zero.grad_norm()

    def update(self, norm: float) -> None:
        """Clip and update this rank's shards."""
        self.zero.step(max_norm=self.max_norm, norm=norm)
        self.zero.zero_grad()

    def copies(self) -> list[Tensor]:
        """None: every rank holds other shards."""
        return []
