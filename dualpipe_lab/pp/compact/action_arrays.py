"""`ActionArrays`: the actions of every rank as integer arrays, which checks, costs and the order of execution read.

In: arrays.  Out: checked, read-only arrays, and what one line says of them.
"""

from dataclasses import dataclass
from functools import cached_property

from dualpipe_lab.pp.compact.arrays import Flags, Ints
from dualpipe_lab.pp.program import WORK_KINDS, Action


@dataclass(frozen=True, eq=False)
class ActionArrays:
    """One entry per action; the attributes are those of `CompactProgram`.

    Raises:
        ValueError: arrays of different lengths, or offsets that do not divide them among the ranks.
    """

    name: str
    num_stages: int
    num_microbatches: int
    offsets: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    second: Flags
    num_directions: int | None = None

    def __post_init__(self) -> None:
        lengths = {len(array) for array in (self.kind, self.stage, self.microbatch, self.second)}
        ends = self.offsets
        if lengths != {int(ends[-1])} or ends[0] != 0 or (ends[1:] < ends[:-1]).any():
            raise ValueError(
                f"the arrays of program {self.name!r} have the lengths {sorted(lengths)}, and its offsets end at "
                f"{int(ends[-1])}; give one entry per action and offsets that grow from 0 to the number of actions"
            )
        for array in (self.offsets, self.kind, self.stage, self.microbatch, self.second):
            array.setflags(write=False)  # what follows from them is kept

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.offsets) - 1

    @property
    def num_actions(self) -> int:
        """The number of actions; a pair has two."""
        return len(self.kind)

    @cached_property
    def has_pairs(self) -> bool:
        """Whether the program has overlapped pairs."""
        return bool(self.second.any())

    @cached_property
    def rank(self) -> Ints:
        """The rank of each action."""
        import numpy as np

        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.offsets))

    def locate(self, action: int) -> tuple[int, int]:
        """Return the rank of an action and the position of its step."""
        import numpy as np

        rank = int(np.searchsorted(self.offsets, action, side="right")) - 1
        start = int(self.offsets[rank])
        return rank, action - start - int(np.count_nonzero(self.second[start : action + 1]))

    def action(self, index: int) -> Action:
        """Return one action by its place in the arrays."""
        return Action(int(self.stage[index]), WORK_KINDS[self.kind[index]], int(self.microbatch[index]))
