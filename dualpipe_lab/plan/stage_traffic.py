"""`StageTraffic`: the calls of one rank's stages along tp, cp and ep, for the forward and backward of a microbatch.

Chapter: book/whole/sums.  In: a plan, a config, a rank, the shape of a microbatch.  Out: `Calls` by kind of layer.
  product, columns   backward a sum of its input's gradient; sequence parallelism gathers the input, both times
  product, rows      a sum of its output; sequence parallelism gathers the output's gradient, and a sum is a scatter
  ring of cp         keys and values of all other ranks; backward they again, and their gradients once round the ring
  recompute          the forward of a layer twice, its last sum included: autograd saves tensors behind it
  split backward     I makes all calls of a backward and W none: layers compute all their gradients at once
  loss_chunk         the same calls: the ranks' sums are exchanged behind the last chunk
The number of calls does not depend on the router, the bytes do.
"""

from collections.abc import Sequence
from itertools import pairwise

from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig, sizes_of
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.rules import contents

COUNT_BYTES = 8  # of a whole number


class StageTraffic:
    """The calls of one rank's stages, for microbatches of `num_rows` sequences of `sequence_length` tokens."""

    def __init__(self, plan: PlanFields, model: ModelConfig, rank: int, num_rows: int, sequence_length: int) -> None:
        self.plan, self.model, self.rank, self.num_rows = plan, model, rank, num_rows
        self.config, self.latent = sizes_of(model), None if isinstance(model, LlamaConfig) else model.latent
        here = plan.topology.at(rank)
        self.pp_rank, self.tp, self.cp = here.rank("pp"), here.ranks("tp"), here.ranks("cp")
        self.ep = here.ranks("ep") if plan.ep > 1 else (rank,)
        self.layout = make_layout(plan.layout, sequence_length, plan.cp) if plan.cp > 1 else None
        self.place, self.hidden = self.cp.index(rank), self.config.hidden_size
        self.num_tokens = num_rows * (sequence_length if self.layout is None else self.layout.size(self.place))
        self.local_tokens = self.num_tokens // (plan.tp if plan.sequence_parallel else 1)
        self.element = plan.element_bytes
        self.wide = max(4, self.element)  # norms and losses are computed in 32 bits at least
        self.boundary_bytes = self.local_tokens * self.hidden * self.element
        self.passes = 2 if plan.recompute else 1  # forwards of a layer
        # of overlapped experts recomputation runs attention and router alone
        self.expert_passes = 1 if plan.overlap else self.passes

    def stage(self, number: int, num_microbatches: int) -> Calls:
        """Return the calls of a stage but for the bytes of rows for experts."""
        total, held = Calls(self.rank), contents(self.plan, self.model)[number]
        for kind, count in held.items():
            total.add(self.unit(kind, copies_table=not held["first"]), count * num_microbatches)
        return total

    def unit(self, kind: str, copies_table: bool = True) -> Calls:
        """Return the calls of a kind of `contents`; `copies_table`: a second token's embedding is a copy."""
        self.calls = Calls(self.rank)
        if kind == "first":
            self._rows()
        elif kind in ("dense", "sparse"):
            self._layer(is_sparse=kind == "sparse")
        else:
            self._head()
        if kind == "second":
            self._second(copies_table)
        return self.calls

    def _layer(self, is_sparse: bool) -> None:
        self._attention()
        self._norm(2)
        if not is_sparse:
            self._columns(passes=self.passes)
            self._rows(passes=self.passes)
            return
        self._gather(times=self.passes + 1)  # every rank of tp routes all tokens; the output's gradient
        self._experts()

    def _head(self) -> None:
        self._columns()
        self._norm(1)
        for numbers in (1, 2):  # the maximum; the logit of the target, and the sum of exponentials
            self.calls.all_reduce(self.tp, numbers * self.num_tokens, self.wide)

    def _second(self, copies_table: bool) -> None:
        """Enter a second token's embedding, projection and layer, between which and the head all is recomputed."""
        self._rows(passes=self.passes if copies_table else 1)
        self._columns(2 * self.hidden, self.passes)
        # the projection's outputs, from which nothing is saved, so that overlapped stages do not gather them again
        self.calls.all_gather(self.tp, self.num_tokens * self.hidden // self.plan.tp, self.element, self.expert_passes)
        self._gather()  # the gradient of the slice of tokens
        self._norm(2)
        self._layer(is_sparse=True)

    def _attention(self) -> None:
        passes, latent, config = self.passes, self.latent, self.config
        self._ring()
        if latent is None:
            self._columns(passes=passes)
            if config.qk_norm:
                self.calls.all_reduce(self.tp, config.size_of_head, self.wide, times=2)
            if self.plan.tp > config.num_kv_heads:
                copies = self.plan.tp // config.num_kv_heads
                first = self.tp.index(self.rank) // copies * copies
                same = self.tp[first : first + copies]  # as one KV head
                self.calls.all_reduce(same, self.hidden * config.size_of_head, self.element, times=2)
        else:
            self._columns(latent.query_rank or self.hidden, passes)
            self._columns(latent.kv_rank, passes, again=not self.sends_latents)
            self._columns(latent.position, passes, again=False)
            for place, numel in enumerate(latent.replicated(self.hidden) if self.plan.sequence_parallel else ()):
                self.calls.all_reduce(self.tp, numel, self.wide if place % 2 else self.element)  # norms are odd
        self._rows(passes=passes)

    def _ring(self) -> None:
        """Enter the hops of keys and values, or of latents that are shorter; of their gradients one hop more."""
        if self.layout is None:
            return
        size, numbers = len(self.cp), 2 * max(self.config.num_kv_heads // self.plan.tp, 1) * self.config.size_of_head
        row = self.num_rows * (self.latent.cached if self.latent is not None and self.sends_latents else numbers)
        # that are here, hop by hop
        blocks = [self.layout.size((self.place - hop) % size) * row for hop in range(size + 1)]
        self._hops(blocks[:size], self.element, self.passes + 1)
        self._hops(blocks, self.wide, 1)

    def _hops(self, blocks: Sequence[int], element_bytes: int, times: int) -> None:
        """Send each block that is here to the next rank of the ring, and receive the following one."""
        before, after = self.cp[self.place - 1], self.cp[(self.place + 1) % len(self.cp)]
        for sent, received in pairwise(blocks):
            if received:
                self.calls.receive(self.cp, before, received * element_bytes, times)
            if sent:
                self.calls.send(self.cp, after, sent * element_bytes, times)

    @property
    def sends_latents(self) -> bool:
        """Whether latents travel round the ring, behind which no layer gathers its input again."""
        heads = self.config.num_heads // self.plan.tp
        return self.layout is not None and self.latent is not None and self.latent.is_shorter(heads)

    def _experts(self) -> None:
        """Enter counts, dispatch and combine, whose bytes `rows` adds, shared experts, and the balance along cp."""
        model, passes, none = self.model, self.expert_passes, [0] * len(self.ep)
        assert not isinstance(model, LlamaConfig)
        counts = [model.num_experts // len(self.ep) * COUNT_BYTES] * len(self.ep)
        self.calls.all_to_all(self.ep, counts, counts, passes)
        self.calls.all_to_all(self.ep, none, none, 2 * (passes + 1))
        if model.num_shared_experts:
            self.calls.all_reduce(self.tp, self.num_tokens * self.hidden, self.element, passes + 1)
        if model.balance and self.layout is not None:  # the counts of each sequence
            self.calls.all_reduce(self.cp, self.num_rows * model.num_experts, COUNT_BYTES, self.passes)

    def rows(self, loads: Sequence[Sequence[int]]) -> Calls:
        """Return the bytes of rows for experts, there and back, from `loads_E` of every rank of ep, and no calls."""
        calls, place = Calls(self.rank), self.ep.index(self.rank)
        share, row = len(loads[0]) // len(self.ep), self.hidden * self.element
        sends = [sum(loads[place][at * share : (at + 1) * share]) * row for at in range(len(self.ep))]
        receives = [sum(load[place * share : (place + 1) * share]) * row for load in loads]
        for there, back in ((sends, receives), (receives, sends)):
            calls.all_to_all(self.ep, there, back, self.expert_passes + 1, count=0)
        return calls

    def uniform(self, num_microbatches: int) -> list[int]:
        """Return loads of a rank that are as even as they can be."""
        assert not isinstance(self.model, LlamaConfig)
        num_slots = self.num_tokens * self.model.num_experts_per_token * num_microbatches
        share, more = divmod(num_slots, self.model.num_experts)
        return [share + (expert < more) for expert in range(self.model.num_experts)]

    def _columns(self, width: int | None = None, passes: int = 1, again: bool = True) -> None:
        """Enter a product sharded by columns; `again`: its backward gathers the input."""
        self._gather(width, passes + again)
        self._sum(width)

    def _rows(self, passes: int = 1) -> None:
        self._sum(times=passes)
        self._gather()

    def _gather(self, width: int | None = None, times: int = 1) -> None:
        if self.plan.sequence_parallel:
            self.calls.all_gather(self.tp, self.local_tokens * (width or self.hidden), self.element, times)

    def _sum(self, width: int | None = None, times: int = 1) -> None:
        enter = self.calls.reduce_scatter if self.plan.sequence_parallel else self.calls.all_reduce
        enter(self.tp, self.num_tokens * (width or self.hidden), self.element, times)

    def _norm(self, times: int) -> None:
        if self.plan.sequence_parallel:
            self.calls.all_reduce(self.tp, self.hidden, self.wide, times)
