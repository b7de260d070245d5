"""The order of one rank: warm-up forwards, then a forward and a backward in turn, then the backwards that are left.

Chapter: book/pp/interleaved.  In: a rank's forwards and backwards, each in order.  Out: its list of actions.
  live activations   num_warmup + 1, and weight_delay more where the backward is split, but never more than there are
1F1B and its descendants differ in four choices only: the two orders, the depth of the warm-up, how long a weight
gradient waits, and whether forward and backward overlap.
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

    `num_warmup`: forwards before the first backward.  `weight_delay`: None for whole backwards (B); otherwise I and W,
    each W that many inputs' gradients behind its own I.  `pairs`: a forward and the whole backward after it are one
    overlapped pair; the first `weight_delay` of them, and the backwards without a forward, stay as they are.

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
