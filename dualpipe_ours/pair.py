"""A forward beside a backward, and a layer with experts in steps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .block import attention, norm
from .execute import KINDS, Run
from .later import SplitStage
from .moe import compute, plan, rows_of, sum_of
from .ring_attention import RingAttention
from .router import choose
from .row_messages import actions
from .steps import Compute, Travel, backward_of, forward_of, take_turns
from .tokens import mlp_between_cut_tokens

Carry = dict[str, Any]
Step = Compute | Travel

FORWARD, BACKWARD = 1, 2  # tags of exchanges


class PairedStage(SplitStage):
    """A stage in steps: its forward can run beside the backward of another one."""

    def __init__(self, steps: Sequence[Step], parameters: Iterable[Tensor]) -> None:
        super().__init__(lambda x: x, parameters)
        self.steps = steps

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """The steps, one after the other."""
        ((y, saved),) = take_turns(forward_of(self.steps, x, FORWARD))
        return y, saved

    def backward(self, saved: Any, dy: Tensor) -> Tensor | None:
        """The same steps from the last to the first."""
        (dx,) = take_turns(backward_of(self.steps, saved, dy, BACKWARD))
        return dx

    def pair(self, x: Tensor, other: "PairedStage", saved: Any, dy: Tensor) -> tuple[Tensor, Any, Tensor | None]:
        """A forward of this stage and a backward of the other; while rows of one travel, the other computes."""
        (y, kept), dx = take_turns(forward_of(self.steps, x, FORWARD), backward_of(other.steps, saved, dy, BACKWARD))
        return y, kept, dx


def layer_steps(
    w: Mapping[str, Any], heads: int, num_experts: int, route: tuple[int, int, int], ranks: list[int]
) -> list[Step]:
    """Attention round the ring, a cut MLP and routed experts: three pieces of work, two exchanges between them."""

    def attend(x: Tensor, _: Carry) -> tuple[Tensor, Carry]:
        x = x + attention(norm(x, w["norm1"]), w, heads, lambda q, k, v: RingAttention.apply(q, k, v, ranks))
        own = norm(x, w["norm2"])
        chosen, weights = choose(own, w["router"], w["bias"], *route)
        note = plan(chosen, num_experts, ranks)
        rest = x + mlp_between_cut_tokens(own, w["up"], w["down"], ranks)  # what no expert changes
        return rows_of(own, note), {"rest": rest, "weights": weights, "note": note}

    def work(rows: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        experts = list(zip(w["gates"], w["ups"], w["downs"], strict=True))
        return compute(rows, carry["note"], experts), carry

    def add(rows: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return carry["rest"] + sum_of(rows, carry["weights"], carry["note"]), {}

    there = Travel(lambda carry: (carry["note"].sends, carry["note"].receives, ranks))
    back = Travel(lambda carry: (carry["note"].receives, carry["note"].sends, ranks))
    return [Compute(attend), there, Compute(work), back, Compute(add)]


def run_pair(run: Run, token: str) -> None:
    """A pair; its backward is a whole one."""
    (of_f, _, i), (of_b, _, j) = actions(token)
    stage, other = run.stages[of_f], run.stages[of_b]
    assert isinstance(stage, PairedStage)
    assert isinstance(other, PairedStage)
    x, (saved, dy) = run.before_f(of_f, i), run.before_b(of_b, j)
    y, kept, dx = stage.pair(x, other, saved, dy)
    run.after_f(of_f, i, y, kept)
    run.after_b(of_b, j, dx)


KINDS.update(OVERLAP_F_B=run_pair)
