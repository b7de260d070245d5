"""Slots: the actions of a compact program in the order of execution, one slot for the result of each.

In: a `CompactProgram` and an `Execution`.  Out: `Slots`, arrays or lists over which a simulation runs.
Slot 0 is the input of an action that needs none: it is there at time 0.  The first action has slot 1.
"""

from functools import cached_property
from typing import TYPE_CHECKING

from dualpipe_lab.pp.compact.arrays import Flags, Ints
from dualpipe_lab.pp.compact.costs import Work
from dualpipe_lab.pp.compact.order import Execution, merge_pairs

if TYPE_CHECKING:
    from dualpipe_lab.pp.compact.action_arrays import ActionArrays
    from dualpipe_lab.pp.compact.check import Wiring
    from dualpipe_lab.pp.compact.stages import Passes


class Slots:
    """What a simulation needs to know of each action, in the order of execution.

    Attributes:
        actions: the place of each action in the compact program's arrays.
        rank: of each action.
        source: the slot of each action's input.
        link: the number of the link that carries each action's result; 0 for none.
        second: whether the action is the backward of a pair.
        passes: the places, from 0, of each rank's first and last steps of its stages.
    """

    def __init__(self, actions: Ints, rank: Ints, source: Ints, link: Ints, second: Flags, passes: "Passes") -> None:
        self.actions, self.rank, self.source, self.link, self.second = actions, rank, source, link, second
        self.passes = passes
        self._classes: tuple[Work, list[int]] | None = None  # of the last simulation

    @cached_property
    def num_links(self) -> int:
        """The number of links between ranks that carry messages."""
        return int(self.link.max(initial=0))

    @cached_property
    def rows(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Rank, source, other source and link of each slot, where seconds follow their firsts.

        The first action of a pair waits for the sources of both; the second runs right behind it, in no time.
        """
        source, other = merge_pairs(self.source, self.second, 0)
        return self.rank.tolist(), source.tolist(), other.tolist(), self.link.tolist()

    @cached_property
    def told(self) -> Ints:
        """The places, ascending, of the steps whose start and end are told: the first and the last ones of stages."""
        import numpy as np

        return np.unique([*self.passes.first, *self.passes.last])

    @cached_property
    def stretches(self) -> list[int]:
        """How many slots there are up to each step whose times are told, behind the one before it."""
        import numpy as np

        lengths: list[int] = np.diff(self.told, prepend=-1).tolist()
        return lengths

    def classes(self, work: Work) -> list[int]:
        """Return the class of each step's cost."""
        known = self._classes
        if known is None or known[0] is not work:
            known = self._classes = work, work.of_action[self.actions].tolist()
        return known[1]


def number_slots(compact: "ActionArrays", execution: Execution, wiring: "Wiring", passes: "Passes") -> Slots:
    """Return the slots of an order of execution."""
    import numpy as np

    order, num = execution.actions, compact.num_actions
    slot = np.zeros(num + 1, np.int32)
    slot[order] = np.arange(1, num + 1, dtype=np.int32)
    source, link = slot[wiring.source[order]], _links(compact, wiring.target)[order]
    passes = passes._replace(first=slot[passes.first] - 1, last=slot[passes.last] - 1)
    return Slots(order, compact.rank[order], source, link, compact.second[order], passes)


def _links(compact: "ActionArrays", target: Ints) -> Ints:
    """Return the number of the link of each action's result, from 1; 0 where it is no message."""
    import numpy as np

    sent = np.flatnonzero(target >= 0)
    key = compact.rank[sent].astype(np.int64) * compact.num_ranks + target[sent]
    links = np.zeros(compact.num_actions, np.int32)
    links[sent] = np.searchsorted(np.unique(key), key) + 1
    return links
