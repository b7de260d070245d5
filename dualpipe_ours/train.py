"""All together: a small model with experts under any rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dualpipe_lab.comm import get_rank, get_world_size

from .block import norm
from .column import linear
from .data import num_tokens, share_of_loss
from .execute import execute
from .held import holders, part_of, sums
from .pair import PairedStage, layer_steps
from .ring import all_reduce
from .row_messages import Place, with_messages
from .steps import Compute, Travel
from .zero1 import ShardedAdam

Weights = dict[str, Any]  # of a layer: tensors by name, and lists of them


class Trainer:
    """Layers on stages; rank = position * size + member of a group that splits tokens, experts and the MLP."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, Any]],
        rows: Sequence[str],
        place: Place,
        num_stages: int,
        size: int,
        heads: int,
        route: tuple[int, int, int],
        lr: float,
    ) -> None:
        self.place, self.num_stages, self.size = place, num_stages, size
        self.position, self.member = divmod(get_rank(), size)
        self.group = [self.position * size + member for member in range(size)]
        self.row = with_messages(rows[self.position], self.position, place, num_stages)
        self.held: dict[int, list[Weights]] = {}
        self.stages: dict[int, PairedStage] = {}
        self.optimizers: list[ShardedAdam] = []
        per_stage = len(layers) // num_stages
        for stage, positions in holders(rows).items():
            if self.position not in positions:
                continue
            full = layers[stage * per_stage : (stage + 1) * per_stage]
            own = [part_of(w, self.member, size) for w in full]
            steps = [step for w in own for step in self._steps(w, heads, len(w["gates"]) * size, route)]
            self.held[stage] = own
            self.stages[stage] = PairedStage(steps, [])
            # Common weights, then split ones: mirrors make the same sums in the same order.
            self.optimizers += [ShardedAdam(*sum_of, lr) for sum_of in sums(own, positions, self.member, size)]

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """Train on (microbatches, tokens), whole on every rank; return the mean loss."""
        for optimizer in self.optimizers:
            for leaf in optimizer.parameters:
                leaf.grad = None
        total = num_tokens(targets, [get_rank()])  # all targets are here: nothing is to be summed
        own_ids, own_targets = (x.chunk(self.size, 1)[self.member] for x in (ids, targets))

        def loss(y: Tensor, i: int) -> Tensor:
            return share_of_loss(y, own_targets[i], total)

        def peers(stage: int, i: int) -> int:
            return self.place(stage, i) * self.size + self.member

        shares = execute(self.row, self.stages, peers, self.num_stages, list(own_ids), loss)
        for optimizer in self.optimizers:
            optimizer.step()
        mean = torch.stack([torch.zeros((), dtype=torch.float64), *shares.values()]).sum()  # a rank may have none
        all_reduce(mean, list(range(get_world_size())))
        return float(mean)

    def _steps(self, w: Weights, heads: int, num_experts: int, route: tuple[int, int, int]) -> list[Compute | Travel]:
        """The steps of a layer; the model's first begins with the table, its last ends with the head."""
        steps = layer_steps(w, heads, num_experts, route, self.group)
        first, last = steps[0], steps[-1]
        assert isinstance(first, Compute)
        assert isinstance(last, Compute)

        def with_head(rows: Tensor, carry: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
            x, rest = last.f(rows, carry)
            return linear(norm(x, w["norm3"]), w["head"]), rest

        if "embed" in w:
            steps[0] = Compute(lambda ids, carry: first.f(w["embed"][ids], carry))
        if "head" in w:
            steps[-1] = Compute(with_head)
        return steps
