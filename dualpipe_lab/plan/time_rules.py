"""`TimeRules`: what a framework hides behind its computation, and how fast its attention is; each with its origin.

In: nothing.  Out: rules for `step_time`.
Numbers that were measured by others, or assumed; none is fitted to the runs that the estimates are held against.
  attention      of 989.4 TFLOP/s on H100, forward and backward: 553 and 422 for 4,096 tokens, 638 and 523 for 16,384
                 (arXiv 2603.07685, table 9, second-hand)
  pairs          DeepSeek's profile of an overlapped pair takes 129.0 ms, its busiest stream 118.2 (profile-data, train)
Elsewhere: Megatron `--overlap-grad-reduce`, `--overlap-param-gather`, `--tp-comm-overlap`.
"""

from dataclasses import dataclass
from typing import Literal

from dualpipe_lab.plan.efficiency import Efficiency
from dualpipe_lab.plan.kept_tensors import check_parts


@dataclass(frozen=True)
class TimeRules:
    """What a framework hides, and what it does more than once.

    Attributes:
        name: of the rules.
        attention: parts of the peak that attention reaches between its products, forward and backward, by the tokens
            of a sequence.
        hides_gradients: gradients are summed behind a rank's last backward, and weights gathered behind its first
            forward.
        tensor_hidden: the part of the seconds along tp that runs behind products.
        hides_ring: a hop round the ring of cp runs behind the attention to the block before it.
        pair_factor: seconds of an overlapped pair of experts, of its busier stream's.
        sums_norms: under sequence parallelism, gradients of norms are summed in every backward, not once per step.
        splits_routing: the ranks of tp share out the tokens that go to experts, and the experts of their rank of ep, so
            that rows travel along tp too; else each of them routes all tokens and has all of these experts.
        by_node: a token goes to another node once, and from there to its experts.
        product_type: type of the numbers of products; None for that of the plan.
        core: how attention between its products is computed: by a flash kernel; or unfused, with all scores of a
            sequence in memory, a softmax and a dropout of them.
        recomputes: parts of a layer that the backward runs again, as in `KeepRules`; a flash kernel's own repetition
            is in its backward.  Calls along tp are not among them.

    Raises:
        ValueError: a part below 0 or above 1, a factor below 1, or a part of a layer that cannot be run again.
    """

    name: str
    attention: tuple[Efficiency, Efficiency] = (
        Efficiency(origin="quoted", points=((4096.0, 553 / 989.4), (16384.0, 638 / 989.4))),
        Efficiency(origin="quoted", points=((4096.0, 422 / 989.4), (16384.0, 523 / 989.4))),
    )
    hides_gradients: bool = False
    tensor_hidden: float = 0.0
    hides_ring: bool = False
    pair_factor: float = 129.0 / 118.2
    sums_norms: bool = False
    splits_routing: bool = True
    by_node: bool = False
    product_type: str | None = None
    core: Literal["flash", "unfused"] = "flash"
    recomputes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.tensor_hidden <= 1:
            raise ValueError(f"the part that is hidden lies between 0 and 1, got tensor_hidden={self.tensor_hidden}")
        if not self.pair_factor >= 1:
            raise ValueError(f"a pair takes at least its busier stream, got pair_factor={self.pair_factor}; use 1.0")
        object.__setattr__(self, "recomputes", frozenset(self.recomputes))
        check_parts(self.recomputes)

    def attention_at(self, sequence_length: int) -> tuple[float, float]:
        """Return the parts of the peak that attention reaches, forward and backward."""
        forward, backward = self.attention
        return forward.at(sequence_length), backward.at(sequence_length)


LAB_TIME = TimeRules("this library", sums_norms=True, splits_routing=False)
MEGATRON_TIME = TimeRules("Megatron with its overlaps", hides_gradients=True, tensor_hidden=0.5, hides_ring=True)
