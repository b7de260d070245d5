"""The order of one rank in three phases: warm-up forwards, alternating forwards and backwards, cool-down backwards.

Chapter: book/pp/interleaved.  In: a rank's forwards and backwards, each in order.  Out: its list of actions.
  live activations   num_warmup + 1, plus weight_delay where the backward is split; at most the number of forwards
1F1B and its descendants differ in four choices only: the two orders, the depth of the warm-up, the delay of a weight
gradient, and whether forward and backward overlap.
"""

from collections import deque
from collections.abc import Sequence

from dualpipe_lab.pp.program import Action, B, Cell, F, I, Overlap, ProgramStep, W


def warmup_steady_cooldown(
    forwards: Sequence[Cell],
    backwards: Sequence[Cell],
    num_warmup: int,
    weight_delay: int | None = None,
    pairs: bool = False,
) -> list[ProgramStep]:
    """Return one rank's steps; cells are (stage, microbatch).

    `num_warmup`: the number of forwards before the first backward.  `weight_delay`: None for full backwards (B);
    otherwise the backwards are split, and each W follows its I after `weight_delay` further I.  `pairs`: a forward and
    the full backward after it are one overlapped pair, except for the first `weight_delay` backwards and those without
    a forward.

    >>> cells = [(0, 0), (0, 1), (0, 2)]
    >>> " ".join(map(str, warmup_steady_cooldown(cells, cells, num_warmup=1, weight_delay=1)))
    '0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2'
    >>> " ".join(map(str, warmup_steady_cooldown(cells, cells, num_warmup=1, pairs=True)))
    '0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2'
    """
    num_warmup = min(num_warmup, len(forwards))
    steps: list[ProgramStep] = [Action(stage, F, m) for stage, m in forwards[:num_warmup]]
    waiting: deque[Action] = deque()  # weight gradients that an I has left
    for index, (stage, m) in enumerate(backwards):
        forward = [Action(later, F, n) for later, n in forwards[num_warmup + index :][:1]]
        if pairs and forward and index >= (weight_delay or 0):
            steps.append(Overlap(forward[0], Action(stage, B, m)))
            continue
        steps += forward
        if weight_delay is None:
            steps.append(Action(stage, B, m))
            continue
        steps.append(Action(stage, I, m))
        waiting.append(Action(stage, W, m))
        if len(waiting) > weight_delay:
            steps.append(waiting.popleft())
    return [*steps, *waiting]
