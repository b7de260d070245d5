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


class Slots:
    """What a simulation needs to know of each action, in the order of execution.

    Attributes:
        actions: the place of each action in the compact program's arrays.
        rank: of each action.
        source: the slot of each action's input.
        link: the number of the link that carries each action's result; 0 for none.
        second: whether the action is the backward of a pair.
    """

    def __init__(self, actions: Ints, rank: Ints, source: Ints, link: Ints, second: Flags) -> None:
        self.actions, self.rank, self.source, self.link, self.second = actions, rank, source, link, second
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

    def classes(self, work: Work) -> list[int]:
        """Return the class of each step's cost."""
        known = self._classes
        if known is None or known[0] is not work:
            known = self._classes = work, work.of_action[self.actions].tolist()
        return known[1]


def number_slots(compact: "ActionArrays", execution: Execution, wiring: "Wiring") -> Slots:
    """Return the slots of an order of execution."""
    import numpy as np

    order, num = execution.actions, compact.num_actions
    slot = np.zeros(num + 1, np.int32)
    slot[order] = np.arange(1, num + 1, dtype=np.int32)
    source = slot[wiring.source[order]]
    return Slots(order, compact.rank[order], source, _links(compact, wiring.target)[order], compact.second[order])


def _links(compact: "ActionArrays", target: Ints) -> Ints:
    """Return the number of the link of each action's result, from 1; 0 where it is no message."""
    import numpy as np

    sent = np.flatnonzero(target >= 0)
    key = compact.rank[sent].astype(np.int64) * compact.num_ranks + target[sent]
    links = np.zeros(compact.num_actions, np.int32)
    links[sent] = np.searchsorted(np.unique(key), key) + 1
    return links
