"""One rank's actions as arrays: in three phases, by DualPipe's eight steps, and those of ZBV.

In: the choices of a schedule.  Out: a `Row`, equal to the row that the schedule's own builder makes.
Instead of appending one action after another, these functions compute the position of each in its row.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dualpipe_lab.pp.compact.arrays import IS_B, IS_F, IS_I, IS_W, NUMBER, Flags, Ints
from dualpipe_lab.pp.program import B, F, I, W
from dualpipe_lab.pp.schedules.eight_steps import Flow, eight_steps
from dualpipe_lab.pp.schedules.interleaved import loop_cells


class Row(NamedTuple):
    """The actions of one rank, in order; the columns are those of a `CompactProgram`."""

    kind: Ints
    stage: Ints
    microbatch: Ints
    second: Flags


class Cells(NamedTuple):
    """Stages and microbatches, in the order in which one rank works on them."""

    stage: Ints
    microbatch: Ints

    def placed(self, rank: int, num_ranks: int) -> "Cells":
        """Return the cells with the stages of a rank on a loop, for those of a loop of one rank."""
        return Cells(rank + num_ranks * self.stage, self.microbatch)


class Flows(NamedTuple):
    """The forwards and the backwards of one rank, each in order."""

    forwards: Cells
    backwards: Cells

    def placed(self, rank: int, num_ranks: int) -> "Flows":
        """Return the flows of a rank on a loop, for those of a loop of one rank."""
        return Flows(*(flow.placed(rank, num_ranks) for flow in self))


def flows_on_loop(round_sizes: Sequence[int], num_virtual_stages: int) -> Flows:
    """Return the flows on a loop of one rank; stages are numbered on it from 0."""
    import numpy as np

    lists = loop_cells(0, 1, round_sizes, num_virtual_stages)
    return Flows(*(Cells(*np.array(cells, np.int32).T) for cells in lists))


def three_phases(flows: Flows, num_warmup: int, weight_delay: int | None = None, pairs: bool = False) -> Row:
    """Return one rank's actions in the order of `schedules.warmup_steady_cooldown`, which explains the choices.

    >>> row = three_phases(flows_on_loop([3], 1), num_warmup=1, weight_delay=1)
    >>> [f"{'FBIW'[kind]}{microbatch}" for kind, _, microbatch, _ in zip(*row)]
    ['F0', 'F1', 'I0', 'F2', 'I1', 'W0', 'I2', 'W1', 'W2']
    """
    import numpy as np

    num, delay = len(flows.forwards.stage), weight_delay or 0
    warmup = min(num_warmup, num)
    index = np.arange(num)
    paired = (index + warmup < num) & (index >= delay) & pairs
    split = np.full(num, weight_delay is not None) & ~paired
    splits_before: Ints = np.cumsum(split) - split
    # Before a backward: the warm-up, the forwards up to its own, the other backwards, the weight gradients due.
    backward_at = warmup + np.minimum(index + 1, num - warmup) + index + np.maximum(splits_before - delay, 0)
    forward_at = np.concatenate([index[:warmup], backward_at[: num - warmup] - 1])
    weights = np.flatnonzero(split)
    total = 2 * num + len(weights)
    rest = np.arange(total - min(delay, len(weights)), total)  # after the last backward
    weight_at = np.concatenate([backward_at[weights[delay:]] + 1, rest])
    row = _empty(total)
    row.second[backward_at[paired]] = True
    delayed = Cells(flows.backwards.stage[weights], flows.backwards.microbatch[weights])
    for at, cells, kind in (
        (forward_at, flows.forwards, IS_F),
        (backward_at, flows.backwards, np.where(split, IS_I, IS_B)),
        (weight_at, delayed, IS_W),
    ):
        row.kind[at], row.stage[at], row.microbatch[at] = kind, *cells
    return row


# Words of the eight steps: each action as twice its kind plus its flow; -1 where a word has no second action.
_PARTS = {f"{kind}{flow}": 2 * NUMBER[kind] + flow for kind in (F, B, I) for flow in (0, 1)} | {W: 2 * IS_W}
_WORDS = {part: (number, -1) for part, number in _PARTS.items()}
_WORDS |= {f"{f}&{b}": (_PARTS[f], _PARTS[b]) for f, b in (("F0", "B1"), ("F1", "B0"))}
_PLACE = {word: place for place, word in enumerate(_WORDS)}


def dualpipe_row(flows: tuple[Flow, Flow], position: int, num_positions: int, num_microbatches: int) -> Row:
    """Return one rank's actions in the order of `eight_steps.steps_of`, which explains the arguments."""
    import numpy as np

    steps = eight_steps(position, num_positions, num_microbatches)
    parts = np.array([*_WORDS.values()])[[_PLACE[word] for words in steps for word in words]]
    acts = parts >= 0
    kind, flow = np.divmod(parts[acts], 2)
    row = _empty(len(kind))
    row.kind[:], row.second[:] = kind, np.nonzero(acts)[1]
    for number, (stage, first) in enumerate(flows):
        for kinds in ((IS_F,), (IS_B, IS_I)):
            at = np.flatnonzero((flow == number) & np.isin(kind, kinds))
            row.stage[at], row.microbatch[at] = stage, first + np.arange(len(at))
    _follow(row)
    return row


def _follow(row: Row) -> None:
    """Give each W the cell of the I that it follows: first in, first out."""
    import numpy as np

    late, early = np.flatnonzero(row.kind == IS_W), np.flatnonzero(row.kind == IS_I)
    row.stage[late], row.microbatch[late] = row.stage[early], row.microbatch[early]


def zbv_row(rank: int, num_ranks: int, num_microbatches: int) -> Row:
    """Return one rank's actions in the order of `schedules.zbv`, for 2 * num_ranks - 1 microbatches or more."""
    import numpy as np

    below = num_ranks - 1 - rank
    down, up = [IS_F, IS_I, IS_W], [4 + kind for kind in (IS_F, IS_I, IS_W)]
    (f_down, i_down, w_down), (f_up, i_up, w_up) = down, up
    work = [f_down] * (2 * below + 1) + [f_up, f_down] * rank + up * (below + 1)
    work += [*down, *up] * (num_microbatches - num_ranks - below)
    work += [i_down, w_down, *up] * below + [i_down, i_up] * rank + [i_down, w_down] * (below + 1)
    work += [w_up] * rank + [w_down] * rank
    row, numbers = _empty(len(work)), np.array(work)
    row.kind[:], row.stage[:] = numbers % 4, np.where(numbers < 4, rank, 2 * num_ranks - 1 - rank)
    for number in (*down, *up):
        at = np.flatnonzero(numbers == number)
        row.microbatch[at] = np.arange(len(at))
    return row


def _empty(length: int) -> Row:
    import numpy as np

    stage, microbatch = np.zeros((2, length), np.int32)
    return Row(np.zeros(length, np.int8), stage, microbatch, np.zeros(length, np.bool_))
