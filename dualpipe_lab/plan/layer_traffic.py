"""`StageTraffic`: the calls that stages of dense layers make: along tp and cp, forward and backward.

Chapter: book/whole/sums.  In: a plan, a config, the shape of a microbatch.  Out: calls, entered by `Calls`.
  a layer, forward      two sums of T h along tp; the keys and values of all other ranks, on the ring of cp
  backward              two sums of T h; keys and values again, and their gradients once round the ring
  sequence parallelism  a sum is a reduce-scatter, or a gather; the inputs of the products are gathered again
  recompute             the forward of a layer once more, its last sum included: autograd saves tensors behind it
  loss_chunk            the same calls: the ranks' sums are exchanged behind the last chunk
Where the backward is split, I makes all of these calls and W none: the layers compute all their gradients at once.
"""

from dualpipe_lab.cp.layouts import SequenceLayout, make_layout
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.plan import Plan

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


class StageTraffic:
    """Enters the calls of one rank's stages, for microbatches of one shape.

    Args:
        plan: a plan that fits the model.
        config: of the full model.
        calls: of the rank.
        num_rows: sequences of a microbatch.
        sequence_length: tokens of a full sequence.
    """

    def __init__(self, plan: Plan, config: LlamaConfig, calls: Calls, num_rows: int, sequence_length: int) -> None:
        self.plan, self.config, self.calls, self.num_rows = plan, config, calls, num_rows
        here = plan.topology.at(calls.rank)
        self.tp, self.cp = here.ranks("tp"), here.ranks("cp")
        self.layout = make_layout(plan.layout, sequence_length, plan.cp) if plan.cp > 1 else None
        self.place = self.cp.index(calls.rank)
        length = sequence_length if self.layout is None else self.layout.size(self.place)
        self.num_tokens = num_rows * length
        self.element = ELEMENT_BYTES[plan.precision]
        self.wide = max(4, self.element)  # norms and losses are computed in 32 bits at least
        self.kv_copies = max(plan.tp // config.num_kv_heads, 1)

    @property
    def boundary_bytes(self) -> int:
        return self.local_tokens * self.config.hidden_size * self.element

    @property
    def local_tokens(self) -> int:
        return self.num_tokens // (self.plan.tp if self.plan.sequence_parallel else 1)

    def forward(self, layers: range, is_first: bool, is_last: bool) -> None:
        if is_first:
            self.sum_output()
        for number in layers:
            self.layer_forward(number)
        if is_last:
            self.head_forward()

    def head_forward(self) -> None:
        self.gather_input()
        for numbers in (1, 2):  # the maximum; the logit of the target, and the sum of exponentials
            self.calls.all_reduce(self.tp, numbers * self.num_tokens, self.wide)

    def head_backward(self) -> None:
        self.sum_input_grad()
        self.sum_norm()

    def backward(self, layers: range, is_first: bool, is_last: bool) -> None:
        """Enter the backward of a stage, or I where it is split."""
        if is_last:
            self.head_backward()
        for number in layers:
            if self.plan.recompute:
                self.layer_again(number)
            self.layer_backward(number)
        if is_first:
            self.gather_output_grad()

    @property
    def position_numbers(self) -> int:
        return 2 * max(self.config.num_kv_heads // self.plan.tp, 1) * self.config.size_of_head

    def sum_output(self, width: int | None = None) -> None:
        numel = self.num_tokens * (width or self.config.hidden_size)
        if self.plan.sequence_parallel:
            self.calls.reduce_scatter(self.tp, numel, self.element)
        else:
            self.calls.all_reduce(self.tp, numel, self.element)

    def gather_input(self, width: int | None = None) -> None:
        if self.plan.sequence_parallel:
            self.calls.all_gather(self.tp, self.local_tokens * (width or self.config.hidden_size), self.element)

    gather_output_grad = gather_input  # of a row-parallel layer: as many tokens

    def sum_input_grad(self, width: int | None = None) -> None:
        self.gather_input(width)
        self.sum_output(width)

    def ffn_forward(self, number: int) -> None:
        self.gather_input()
        self.sum_output()

    def ffn_backward(self, number: int) -> None:
        self.gather_output_grad()
        self.sum_input_grad()

    def layer_again(self, number: int) -> None:
        self.layer_forward(number)

    def attention_forward(self) -> None:
        self.gather_input()
        self.ring("forward")
        self.sum_output()

    def attention_backward(self) -> None:
        self.gather_output_grad()
        self.ring("backward")
        self._attention_input_grad()

    def layer_forward(self, number: int) -> None:
        self.attention_forward()
        self.ffn_forward(number)

    def layer_backward(self, number: int) -> None:
        self.ffn_backward(number)
        self.sum_norm()
        self.attention_backward()
        self.sum_norm()

    def _attention_input_grad(self) -> None:
        """Sum what queries, keys and values share: norms over one head, their input's gradient, copies of key heads."""
        config = self.config
        if config.qk_norm:
            for _ in range(2):
                self.calls.all_reduce(self.tp, config.size_of_head, self.wide)
        self.sum_input_grad()
        if self.plan.tp > config.num_kv_heads:
            first = self.tp.index(self.calls.rank) // self.kv_copies * self.kv_copies
            for _ in range(2):
                numel = config.hidden_size * config.size_of_head
                self.calls.all_reduce(self.tp[first : first + self.kv_copies], numel, self.element)

    def sum_norm(self) -> None:
        if self.plan.sequence_parallel:
            self.calls.all_reduce(self.tp, self.config.hidden_size, self.wide)

    def ring(self, direction: str) -> None:
        """Enter the hops of keys and values, and in the backward those of their gradients, one hop more."""
        size, layout = len(self.cp), self.layout
        if layout is None:
            return
        for step in range(size - 1):
            self._hop(layout, step, self.element)
        if direction == "backward":
            for step in range(size):
                self._hop(layout, step, self.wide)

    def _hop(self, layout: SequenceLayout, step: int, element_bytes: int) -> None:
        """Send the block that is here at a step to the next rank of the ring, and receive the following one."""
        size = len(self.cp)
        position = self.num_rows * self.position_numbers * element_bytes
        sent, received = (layout.size((self.place - hop) % size) * position for hop in (step, step + 1))
        if received:
            self.calls.receive(self.cp[self.place - 1], received)
        if sent:
            self.calls.send(self.cp[(self.place + 1) % size], sent)
