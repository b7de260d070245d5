"""`StageTraffic`: the calls that the stages of one rank make: along tp, cp and ep, forward and backward.

Chapter: book/whole/sums.  In: a plan, a config, the shape of a microbatch.  Out: calls, entered by `Calls`.
  a layer, forward      two sums of T h along tp; the keys and values of all other ranks, on the ring of cp
  backward              two sums of T h; keys and values again, and their gradients once round the ring
  sequence parallelism  a sum is a reduce-scatter, or a gather; the inputs of the products are gathered again
  recompute             the forward of a layer once more, its last sum included: autograd saves tensors behind it
  loss_chunk            the same calls: the ranks' sums are exchanged behind the last chunk
Where the backward is split, I makes all of these calls and W none: the layers compute all their gradients at once.
  experts     forward counts, dispatch, combine: rows of h to the ranks of their experts, and back; backward the
              gradients of combine and dispatch, the same rows; with recompute the forward once more
  shared      an expert that every token uses: a sum of T h forward and one backward
  experts, tp every rank of tp routes all tokens: under sequence parallelism they are gathered for that
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
from itertools import pairwise
from typing import TypeAlias

from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.launch.record import traffic
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.rules import sizes_of
from dualpipe_lab.tp.latent_sizes import LatentSizes

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
COUNT_BYTES = 8  # of a whole number
Routing: TypeAlias = Mapping[tuple[int, int], Sequence[int]]  # by rank and layer: load_E of the rank's step


class StageTraffic:
    """Enters the calls of one rank's stages, for microbatches of `num_rows` sequences of `sequence_length` tokens."""

    def __init__(self, plan: PlanFields, model: ModelConfig, calls: Calls, num_rows: int, sequence_length: int) -> None:
        self.plan, self.calls, self.num_rows = plan, calls, num_rows
        self.model, self.config = model, sizes_of(model)
        self.latent = None if isinstance(model, LlamaConfig) else model.latent
        here = plan.topology.at(calls.rank)
        self.tp, self.cp = here.ranks("tp"), here.ranks("cp")
        self.ep = here.ranks("ep") if plan.ep > 1 else (calls.rank,)
        self.layout = make_layout(plan.layout, sequence_length, plan.cp) if plan.cp > 1 else None
        self.place = self.cp.index(calls.rank)
        self.num_tokens = num_rows * (sequence_length if self.layout is None else self.layout.size(self.place))
        self.local_tokens = self.num_tokens // (plan.tp if plan.sequence_parallel else 1)
        self.element = ELEMENT_BYTES[plan.precision]
        self.wide = max(4, self.element)  # norms and losses are computed in 32 bits at least
        self.boundary_bytes = self.local_tokens * self.config.hidden_size * self.element
        heads = self.config.num_heads // plan.tp
        self.sends_latents = self.layout is not None and self.latent is not None and self.latent.is_shorter(heads)
        self.position_numbers = 2 * max(self.config.num_kv_heads // plan.tp, 1) * self.config.size_of_head
        if self.latent is not None and self.sends_latents:
            self.position_numbers = self.latent.cached

    def forward(self, layers: range, is_first: bool, is_last: bool) -> None:
        if is_first:
            self.sum_output()
        for number in layers:
            self.layer_forward(number)
        if is_last:
            self.head_forward()

    def backward(self, layers: range, is_first: bool, is_last: bool) -> None:
        if is_last:
            self.head_backward()
        for number in layers:
            if self.plan.recompute:
                self.layer_again(number)
            self.layer_backward(number)
        if is_first:
            self.gather_input()  # the output's gradient

    def mtp_forward(self) -> None:
        self.sum_output()
        self._projection(gathers=True)
        self.layer_forward(self.model.num_layers)
        self.head_forward()

    def mtp_backward(self, has_table: bool) -> None:
        """Enter the second token's backward; `has_table`: its embedding is a copy, looked up once more."""
        if self.plan.recompute:
            if has_table:
                self.sum_output()
            self._projection(gathers=not self.plan.overlap)
            self.layer_again(self.model.num_layers)
        self.head_backward()
        self.layer_backward(self.model.num_layers)
        if self.plan.sequence_parallel:
            self.gather_input()  # the gradient of the slice of tokens
        self.sum_input_grad(2 * self.config.hidden_size)
        for _ in range(2):
            self.sum_norm()
        self.gather_input()

    def _projection(self, gathers: bool) -> None:
        self.gather_input(2 * self.config.hidden_size)
        if gathers:
            numel = self.num_tokens * self.config.hidden_size // self.plan.tp
            self.calls.all_gather(self.tp, numel, self.element)

    def head_forward(self) -> None:
        self.gather_input()
        for numbers in (1, 2):  # the maximum; the logit of the target, and the sum of exponentials
            self.calls.all_reduce(self.tp, numbers * self.num_tokens, self.wide)

    def head_backward(self) -> None:
        self.sum_input_grad()
        self.sum_norm()

    def layer_forward(self, number: int) -> None:
        self.attention_forward()
        self.gather_input()
        if not self.has_router(number):
            self.sum_output()
            return
        counts = [self.sparse.num_experts // len(self.ep) * COUNT_BYTES] * len(self.ep)
        self.calls.all_to_all(self.ep, counts, counts)
        self._experts()
        self._balance()

    def layer_again(self, number: int) -> None:
        if not self.has_router(number) or not self.plan.overlap:
            self.layer_forward(number)
            return
        self.attention_forward()
        self.gather_input()
        self._balance()

    def layer_backward(self, number: int) -> None:
        self.gather_input()  # the output's gradient, of as many tokens
        self._experts() if self.has_router(number) else self.sum_input_grad()
        self.sum_norm()
        self.gather_input()
        self.ring("backward")
        self._attention_input_grad() if self.latent is None else self._latents_grad(self.latent)
        self.sum_norm()

    def attention_forward(self) -> None:
        if self.latent is None:
            self.gather_input()
        else:
            for width in (self.latent.query_rank, self.latent.kv_rank, self.latent.position):
                self.gather_input(width)
        self.ring("forward")
        self.sum_output()

    def _attention_input_grad(self) -> None:
        """Sum what queries, keys and values share: norms over one head, their input's gradient, copies of KV heads."""
        config = self.config
        if config.qk_norm:
            for _ in range(2):
                self.calls.all_reduce(self.tp, config.size_of_head, self.wide)
        self.sum_input_grad()
        if self.plan.tp > config.num_kv_heads:
            copies = self.plan.tp // config.num_kv_heads
            first = self.tp.index(self.calls.rank) // copies * copies
            for _ in range(2):
                numel = config.hidden_size * config.size_of_head
                self.calls.all_reduce(self.tp[first : first + copies], numel, self.element)

    def _latents_grad(self, sizes: LatentSizes) -> None:
        self.sum_input_grad(sizes.query_rank)
        self.sum_output(sizes.kv_rank) if self.sends_latents else self.sum_input_grad(sizes.kv_rank)
        self.sum_output(sizes.position)
        if self.plan.sequence_parallel:
            for place, numel in enumerate(sizes.replicated(self.config.hidden_size)):
                self.calls.all_reduce(self.tp, numel, self.wide if place % 2 else self.element)  # norms are odd

    def has_router(self, number: int) -> bool:
        return not isinstance(self.model, LlamaConfig) and number >= self.model.num_dense_layers

    @property
    def sparse(self) -> V3MoEConfig:
        assert isinstance(self.model, V3MoEConfig)
        return self.model

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

    def _experts(self) -> None:
        """Enter two exchanges of rows, whose bytes `enter_rows` adds, and the sum of shared experts."""
        for _ in range(2):
            self.calls.all_to_all(self.ep, [0] * len(self.ep), [0] * len(self.ep))
        if self.sparse.num_shared_experts:
            self.calls.all_reduce(self.tp, self.num_tokens * self.config.hidden_size, self.element)

    def _balance(self) -> None:
        if self.sparse.balance and self.layout is not None:
            self.calls.all_reduce(self.cp, self.num_rows * self.sparse.num_experts, COUNT_BYTES)

    def sum_output(self, width: int | None = None) -> None:
        numel = self.num_tokens * (width or self.config.hidden_size)
        enter = self.calls.reduce_scatter if self.plan.sequence_parallel else self.calls.all_reduce
        enter(self.tp, numel, self.element)

    def gather_input(self, width: int | None = None) -> None:
        """Enter the gather of a product's input, or of its output's gradient, which has as many tokens."""
        if self.plan.sequence_parallel:
            self.calls.all_gather(self.tp, self.local_tokens * (width or self.config.hidden_size), self.element)

    def sum_input_grad(self, width: int | None = None) -> None:
        self.gather_input(width)
        self.sum_output(width)

    def sum_norm(self) -> None:
        if self.plan.sequence_parallel:
            self.calls.all_reduce(self.tp, self.config.hidden_size, self.wide)

    def ring(self, direction: str) -> None:
        """Enter the hops of keys and values, and in the backward those of their gradients, one hop more."""
        size, layout = len(self.cp), self.layout
        if layout is None:
            return
        row = self.num_rows * self.position_numbers
        blocks = [layout.size((self.place - hop) % size) * row for hop in range(size + 1)]  # that are here, hop by hop
        self._hops(blocks[:size], self.element)
        if direction == "backward":
            self._hops(blocks, self.wide)

    def _hops(self, blocks: Sequence[int], element_bytes: int) -> None:
        """Send each block that is here to the next rank of the ring, and receive the following one."""
        before, after = self.cp[self.place - 1], self.cp[(self.place + 1) % len(self.cp)]
        for sent, received in pairwise(blocks):
            if received:
                self.calls.receive(before, received * element_bytes)
            if sent:
                self.calls.send(after, sent * element_bytes)
