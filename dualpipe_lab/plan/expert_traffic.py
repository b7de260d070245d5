"""`ExpertTraffic`: the calls of a V3-style model's stages: latent attention, experts, the second token.

Chapter: book/whole/sums.  In: a plan, a config, how many tokens chose each expert.  Out: calls, entered by `Calls`.
  forward     counts, dispatch, combine: rows of h to the ranks of their experts, and back
  backward    combine's and dispatch's gradients, the same rows; with recompute the forward once more
  shared      an expert that every token uses: a sum of T h forward and one backward
  tp          every rank of tp routes all tokens: under sequence parallelism they are gathered for that
  balance     along cp the counts of each sequence, B E whole numbers, are summed
  overlap     recomputation runs attention and router once more, and no expert
  latents     forward the sum of T h and the ring of cp; backward sums of T r_q (T h without a latent of queries),
              T r_kv and T d_position; under sequence parallelism the down-projections and their norms are summed
  latents, cp they travel where they are shorter than the keys and values of a rank's heads; what unfolds them is then
              no layer that gathers its input again
  second      forward the embedding's sum, the gather of the projection's outputs, the extra layer, head and loss again;
              backward the same of gradients, and the gather of tokens where the projection's were sliced; recomputed is
              all between embedding (its copy included) and head, of overlapped experts without what is behind the
              exchanges and without the gather behind the projection, from which nothing is saved
The number of calls does not depend on the router, the bytes do.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from dualpipe_lab.launch.record import traffic
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.layer_traffic import StageTraffic
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.tp.latent_sizes import LatentSizes

Routing: TypeAlias = Mapping[tuple[int, int], Sequence[int]]  # by rank and layer: load_E of the rank's step
_COUNT = 8  # bytes of a whole number


class LatentTraffic:
    """Enters the calls of latent attention.

    Args:
        stage: of this rank.
        sizes: of latents and heads.
    """

    def __init__(self, stage: StageTraffic, sizes: LatentSizes) -> None:
        self.stage, self.sizes = stage, sizes
        self.sends_latents = stage.layout is not None and sizes.is_shorter(stage.config.num_heads // stage.plan.tp)
        self.query_width = sizes.query_rank or stage.config.hidden_size

    def forward(self) -> None:
        for width in (self.query_width, self.sizes.kv_rank, self.sizes.position):
            self.stage.gather_input(width)
        self.stage.ring("forward")
        self.stage.sum_output()

    def backward(self) -> None:
        """Enter its backward."""
        stage, rank = self.stage, self.sizes.kv_rank
        stage.gather_output_grad()
        stage.ring("backward")
        stage.sum_input_grad(self.query_width)
        stage.sum_output(rank) if self.sends_latents else stage.sum_input_grad(rank)
        stage.sum_output(self.sizes.position)
        if stage.plan.sequence_parallel:
            for place, numel in enumerate(self.sizes.replicated(stage.config.hidden_size)):
                stage.calls.all_reduce(stage.tp, numel, stage.wide if place % 2 else stage.element)  # norms are odd


class ExpertTraffic(StageTraffic):
    """Enters the calls of one rank's stages, where some layers have experts.

    Args:
        plan: a plan that fits the model.
        config: of the full model.
        calls: of the rank.
        num_rows: sequences of a microbatch.
        sequence_length: tokens of a full sequence.
    """

    def __init__(self, plan: Plan, config: V3MoEConfig, calls: Calls, num_rows: int, sequence_length: int) -> None:
        super().__init__(plan, config.dense, calls, num_rows, sequence_length)
        self.sparse = config
        self.ep = plan.topology.at(calls.rank).ranks("ep") if plan.ep > 1 else (calls.rank,)
        self.latent = None if config.latent is None else LatentTraffic(self, config.latent)

    @property
    def position_numbers(self) -> int:
        if self.latent is not None and self.latent.sends_latents:
            return self.latent.sizes.cached
        return super().position_numbers

    def attention_forward(self) -> None:
        super().attention_forward() if self.latent is None else self.latent.forward()

    def attention_backward(self) -> None:
        super().attention_backward() if self.latent is None else self.latent.backward()

    def ffn_forward(self, number: int) -> None:
        """Enter the forward of a layer's feed-forward network."""
        if number < self.sparse.num_dense_layers:
            super().ffn_forward(number)
            return
        self.gather_input()
        counts = [self.sparse.num_experts // len(self.ep) * _COUNT] * len(self.ep)
        self.calls.all_to_all(self.ep, counts, counts)
        self._exchange_twice()
        self._shared()
        self._balance()

    def layer_again(self, number: int) -> None:
        if number < self.sparse.num_dense_layers or not self.plan.overlap:
            super().layer_again(number)
            return
        self.attention_forward()
        self.gather_input()
        self._balance()

    def ffn_backward(self, number: int) -> None:
        if number < self.sparse.num_dense_layers:
            super().ffn_backward(number)
            return
        self.gather_output_grad()
        self._exchange_twice()
        self._shared()

    def enter_rows(self, layer: int, routing: Routing) -> None:
        """Enter the bytes of all exchanges of a layer in the step: every row goes there and back, twice or thrice."""
        share = self.sparse.num_experts // len(self.ep)
        place = self.ep.index(self.calls.rank)
        sends = [sum(routing[self.calls.rank, layer][at * share : (at + 1) * share]) for at in range(len(self.ep))]
        receives = [sum(routing[rank, layer][place * share : (place + 1) * share]) for rank in self.ep]
        rows = traffic.all_to_all(sends, receives, place)
        again = self.plan.recompute and not self.plan.overlap
        times = (3 if again else 2) * self.config.hidden_size * self.element
        entry = self.calls.ledger.entries["all_to_all_single"]
        entry.sent += (rows.sent + rows.received) * times
        entry.received += (rows.sent + rows.received) * times
        for peer, sent, received in zip(self.ep, sends, receives, strict=True):
            if peer != self.calls.rank:
                entry.sent_to[peer] += (sent + received) * times

    def _exchange_twice(self) -> None:
        for _ in range(2):
            self.calls.all_to_all(self.ep, [0] * len(self.ep), [0] * len(self.ep))

    def _balance(self) -> None:
        if self.sparse.balance and self.layout is not None:
            self.calls.all_reduce(self.cp, self.num_rows * self.sparse.num_experts, _COUNT)

    def _shared(self) -> None:
        if self.sparse.num_shared_experts:
            self.calls.all_reduce(self.tp, self.num_tokens * self.config.hidden_size, self.element)


def second_forward(stage: StageTraffic, number: int) -> None:
    """Enter the forward of what predicts a second token, whose layer has this number."""
    stage.sum_output()
    _projection(stage)
    _gather_features(stage)
    stage.layer_forward(number)
    stage.head_forward()


def second_backward(stage: StageTraffic, number: int, has_table: bool) -> None:
    """Enter its backward; `has_table`: the embedding is a copy, which the part itself looks up."""
    if stage.plan.recompute:
        if has_table:
            stage.sum_output()
        _projection(stage)
        if not stage.plan.overlap:
            _gather_features(stage)
        stage.layer_again(number)
    stage.head_backward()
    stage.layer_backward(number)
    if stage.plan.sequence_parallel:
        stage.gather_input()  # the gradient of the slice of tokens
    stage.sum_input_grad(2 * stage.config.hidden_size)
    for _ in range(2):
        stage.sum_norm()
    stage.gather_output_grad()


def _projection(stage: StageTraffic) -> None:
    stage.gather_input(2 * stage.config.hidden_size)


def _gather_features(stage: StageTraffic) -> None:
    stage.calls.all_gather(stage.tp, stage.num_tokens * stage.config.hidden_size // stage.plan.tp, stage.element)


def even_loads(num_slots: int, num_experts: int) -> list[int]:
    """Return how many tokens choose each expert if the choices are spread as evenly as they can be.

    >>> even_loads(10, 4)
    [3, 3, 2, 2]
    """
    share, more = divmod(num_slots, num_experts)
    return [share + (expert < more) for expert in range(num_experts)]


def router_calls(calls: Calls, plan: Plan, num_routers: dict[int, int], num_experts: int) -> None:
    """Enter the sums of the experts' loads, by which the routers' biases move, once per step.

    `num_routers`: by stage of this rank.
    """
    total = sum(num_routers.values())
    if not total:
        return
    here = plan.topology.at(calls.rank)
    calls.all_reduce(here.ranks(*plan.copy_axes) if plan.copy_axes else (calls.rank,), total * num_experts, _COUNT)
    shared: dict[int, int] = {}  # by rank of pp with copies: the routers of those
    for stage, count in num_routers.items():
        for other in plan.holders(stage):
            if other != here.rank("pp"):
                shared[other] = shared.get(other, 0) + count
    for other, count in shared.items():
        if count:
            calls.send(here.ranks("pp")[other], count * num_experts * _COUNT)
            calls.receive(here.ranks("pp")[other], count * num_experts * _COUNT)
