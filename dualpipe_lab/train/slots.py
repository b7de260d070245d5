"""`TrainedSlots`: the experts of a training in slots, and a new plan after every few steps, while training goes on.

Chapter: book/ep/moving-experts.  In: a rank's stages, the loads that the routers counted.  Out: moved experts, loads.
  start   all experts count as equally busy; more slots than experts give replicas
  plan    after every k steps, from the loads of these k steps: `rebalance`, with a budget of slots for each layer
  load    the largest of the ranks of ep over their mean, of the layer in which that is highest: 1 is even
Elsewhere: no counterpart in training frameworks that we looked into.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.ep.eplb.balanced import balance
from dualpipe_lab.ep.eplb.placement import make_placement, rank_loads
from dualpipe_lab.ep.moe.layer import MoE
from dualpipe_lab.ep.moving_experts import rebalance
from dualpipe_lab.ep.placed_experts import PlacedExperts, place_experts
from dualpipe_lab.models.rank_model import RankModel
from dualpipe_lab.train.options import Options


class TrainedSlots:
    """The placed layers of a rank's stages, in the order of their numbers; every rank makes it before the optimizer.

    Args:
        model: the stages, whose experts are placed.
        options: number of slots, steps between plans, budget.
    """

    def __init__(self, model: RankModel, options: Options) -> None:
        self.layers: list[PlacedExperts] = []
        self._every, self._max_moves, self._sums = options.rebalance_every, options.max_moves, list[Tensor]()
        if options.num_slots is None:
            return
        for _, stage in sorted(model.stages.items()):
            found = [layer.experts for layer in stage.modules() if isinstance(layer, MoE)]
            if found:
                even = [[1.0] * found[0].num_experts] * len(found)
                self.layers += place_experts(stage, balance(even, options.num_slots, num_ranks=found[0].ep.size))

    def after_step(self, step: int, loads: Sequence[Tensor], optimizer: ShardedOptimizer) -> tuple[float, float]:
        """Count the loads of a step, and move experts if it is time for that; every rank calls this.

        Args:
            step: counted from 1.
            loads: `load_E` of each layer, summed over all data ranks.
            optimizer: of the model.

        Returns:
            The load of the tokens since the last plan (without plans: of the step), and that of the same tokens after
            a move; 0 where there are no slots, or no move.
        """
        if not self.layers:
            return 0.0, 0.0
        self._sums = [a + b for a, b in zip(self._sums, loads, strict=True)] if self._sums else list(loads)
        sums, before, after = self._sums, self._load(self._sums), 0.0
        if self._every is not None and step % self._every == 0:
            rebalance(self.layers, sums, optimizer, self._max_moves)
            after = self._load(sums)
        if self._every is None or after:
            self._sums = []
        return before, after

    def _load(self, loads: Sequence[Tensor]) -> float:
        size, weight = self.layers[0].ep.size, torch.stack(list(loads)).cpu().double()
        tables = torch.tensor([layer.table for layer in self.layers])
        each = rank_loads(weight, make_placement(tables.numpy(), weight.shape[1]), size)
        return float((each.max(1).values / each.mean(1).clamp_min(1e-30)).max())
