"""Training runs whose two ranks share the model or its sequences: tensor, context and pipeline parallel.

Chapter: book/whole/museum.  In: two ranks.  Out: a `RankLog`; the loop is that of `training_run`.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from dualpipe_course.whole.training_run import LENGTH, LLAMA, MICROBATCHES, Microbatch, TrainingRun
from dualpipe_lab import comm, cp, dp, models, pp, tp
from dualpipe_lab.topology import Topology


class TensorRanks(TrainingRun):
    """Two ranks that share each layer, with one KV head, of which both hold a copy."""

    topology, data_axes = Topology([("tp", 2)]), ()

    def make_model(self) -> nn.Module:
        """A model whose ranks share one KV head."""
        config = replace(LLAMA, num_kv_heads=1)
        return models.Llama(config, self.mesh, coalesce=True, dtype=torch.float64)

    def sum_gradients(self) -> None:
        """Sum what each rank knows in part: the gradients of the KV head."""
        tp.sum_partial_gradients(self.model)

    def norm(self) -> float:
        """The norm in which each element of the full model counts once."""
        return dp.ModelSpec(self.model, self.mesh).gradient_norm()

    def copies(self) -> list[Tensor]:
        """Keys, values and norms."""
        names = [name for name, _ in self.model.named_parameters() if ".k." in name or ".v." in name or "norm" in name]
        return [self.model.get_parameter(name) for name in names]


class ContextParallel(TrainingRun):
    """Two ranks that share each sequence, with ring attention."""

    topology, data_axes = Topology([("cp", 2)]), ("cp",)
    layout = cp.make_layout("zigzag", LENGTH, 2)

    def make_model(self) -> nn.Module:
        """The model, with this run's attention."""
        return models.Llama(LLAMA, self.mesh, attend=self.attend, layout=self.layout, dtype=torch.float64)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the ranks."""
        return cp.ring_attention(q, k, v, self.layout, group=self.data, kernel=self.kernel())

    def kernel(self) -> cp.Kernel:
        """Attention of one block to another."""
        return cp.FlashTiles()

    def share(self, full: Tensor) -> Tensor:
        """Some positions of all sequences."""
        return cp.shard_sequence(full, self.layout, self.data_rank())


class Pipeline(TrainingRun):
    """Two ranks with a stage each, under 1F1B."""

    topology, data_axes = Topology([("pp", 2)]), ()

    def make_model(self) -> nn.Module:
        """This rank's stage."""
        full = models.Llama(LLAMA, Topology([("dp", 2)]), dtype=torch.float64)
        return _First(full) if self.mesh.rank("pp") == 0 else _Last(full)

    def prepare(self) -> None:
        """Make the optimizer and the runtime."""
        super().prepare()
        program, group = pp.schedules.one_f_one_b(2, MICROBATCHES), self.mesh.group("pp")
        self.runtime = pp.PipelineRuntime(program, {self.mesh.rank("pp"): self.model}, self.loss_of, group=group)

    def accumulate(self, batch: list[Microbatch]) -> Tensor:
        """Run the program; only the last stage has losses."""
        self.total = self.num_tokens(batch)
        ids, targets = zip(*batch, strict=True)
        found = self.runtime.step(ids, targets, weights=[1.0] * MICROBATCHES).losses
        return sum(found.values(), torch.zeros((), dtype=torch.float64))  # the last stage has the losses

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The summand of a microbatch in the mean over all targets; the last stage calls this."""
        return dp.token_loss(logits, targets, self.total)

    def logged(self, loss: Tensor) -> float:
        """The last stage's loss."""
        total = loss.clone()
        comm.all_reduce(total, group=self.mesh.group("pp"))
        return float(total)

    def sum_gradients(self) -> None:
        """Each rank has other weights and all of the data: nothing is to be summed."""

    def norm(self) -> float:
        """The norm over both stages."""
        gradients = [(p.grad, ("pp",)) for p in self.model.parameters() if p.grad is not None]
        return dp.global_norm(gradients, {"pp": self.mesh.group("pp")})

    def copies(self) -> list[Tensor]:
        """None: each rank has its own stage."""
        return []


class _First(nn.Module):  # type: ignore[misc]
    def __init__(self, full: models.Llama) -> None:
        super().__init__()
        self.embedding, self.layers = full.get_submodule("embedding"), full.layers[:1]

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class _Last(nn.Module):  # type: ignore[misc]
    def __init__(self, full: models.Llama) -> None:
        super().__init__()
        self.layers = full.layers[1:]
        self.norm, self.head = full.get_submodule("norm"), full.get_submodule("head")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
