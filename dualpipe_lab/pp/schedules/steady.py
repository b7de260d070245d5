"""The order of one rank: warm-up forwards, then a forward and a backward in turn, then the backwards that are left.

Chapter: book/pp/interleaved.  In: a rank's forwards and backwards, each in order.  Out: its list of actions.
  live activations   num_warmup + 1, and weight_delay more where the backward is split, but never more than there are
1F1B and its descendants differ in three choices only: the two orders, the depth of the warm-up, and how long a weight
gradient waits.
"""

from collections.abc import Iterator, Sequence

from dualpipe_lab.pp.program import Action, B, Cell, F, I, W


def in_turn(
    forwards: Sequence[Cell], backwards: Sequence[Cell], num_warmup: int, weight_delay: int | None = None
) -> list[Action]:
    """Return one rank's actions; cells are (stage, microbatch).

    `num_warmup`: forwards before the first pair.  `weight_delay`: None for whole backwards (B); otherwise I and W, each
    W that many inputs' gradients behind its own I.

    >>> cells = [(0, 0), (0, 1), (0, 2)]
    >>> " ".join(map(str, in_turn(cells, cells, num_warmup=1, weight_delay=1)))
    '0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2'
    """
    num_warmup = min(num_warmup, len(forwards))
    actions = [Action(stage, F, m) for stage, m in forwards[:num_warmup]]
    for index in range(len(backwards)):
        if num_warmup + index < len(forwards):
            stage, m = forwards[num_warmup + index]
            actions.append(Action(stage, F, m))
        actions += _backward(backwards, index, weight_delay)
    if weight_delay:
        actions += [Action(stage, W, m) for stage, m in backwards[-weight_delay:]]
    return actions


def _backward(backwards: Sequence[Cell], index: int, weight_delay: int | None) -> Iterator[Action]:
    stage, m = backwards[index]
    yield Action(stage, B if weight_delay is None else I, m)
    if weight_delay is not None and index >= weight_delay:
        late_stage, late_m = backwards[index - weight_delay]
        yield Action(late_stage, W, late_m)
