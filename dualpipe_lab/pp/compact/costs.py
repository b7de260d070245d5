"""The ticks of every step of a compact program, as numbers of one type.

In: a `CompactProgram` and a `Cost`.  Out: `Ticks`.
Fractions are multiplied by their common denominator: integers are added and compared ten times as fast, and exact too.
A pair has the ticks that `Cost.of_pair` gives it.
"""

from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_lab.pp.compact.arrays import IS_B, Ints
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import WORK_KINDS, Overlap
from dualpipe_lab.timeline import Time

if TYPE_CHECKING:
    from dualpipe_lab.pp.compact.action_arrays import ActionArrays


class Ticks(NamedTuple):
    """The costs of one simulation, each multiplied by `scale`.

    Attributes:
        of_work: ticks of each class of steps (see `Work`).
        latency, transfer: of each message.
        scale: an integer; 1 unless there are fractions.
        number: int, float, or object for a mixture of floats and fractions.
    """

    of_work: list[Any]
    latency: Any
    transfer: Any
    scale: int
    number: type

    def restore(self, time: Any) -> Time:
        """Return a time in the units of the costs."""
        return time if self.scale == 1 else Fraction(time, self.scale)


class Work(NamedTuple):
    """The classes of steps: an action by its kind and stage, a pair by those of both actions.

    Attributes:
        of_action: the class of each action; a pair's is that of its forward, and its backward takes no more time.
        pairs: the forward of one pair per class.  Classes are numbered: actions, the backward of a pair, pairs.
    """

    of_action: Ints
    pairs: list[int]


def classify(compact: "ActionArrays", each_pair: bool = False) -> Work:
    """Return the classes of steps; `each_pair`: every pair is a class of its own."""
    import numpy as np

    stages = compact.num_stages
    work = compact.kind.astype(np.int32) * stages + compact.stage
    pairs = np.flatnonzero(compact.second) - 1
    key = np.arange(len(pairs))
    if not each_pair:
        backward = pairs + 1
        key = (compact.stage[pairs].astype(np.int64) * 2 + (compact.kind[backward] == IS_B)) * stages
        key += compact.stage[backward]
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    nothing = len(WORK_KINDS) * stages
    work[pairs], work[pairs + 1] = nothing + 1 + number, nothing
    return Work(work, pairs[first].tolist())


def price(compact: "ActionArrays", cost: Cost, work: Work) -> Ticks:
    """Return the ticks of every class of steps and of the links."""
    table = cost.per_stage(compact.num_stages)
    of_work = [*(ticks for kind in WORK_KINDS for ticks in table[kind]), 0]
    for forward in work.pairs:
        pair = Overlap(compact.action(forward), compact.action(forward + 1))
        of_work.append(cost.of_pair(pair, table))
    return _scaled([*of_work, cost.latency, cost.transfer])


def _scaled(numbers: list[Any]) -> Ticks:
    types, scale, number = set(map(type, numbers)), 1, object
    if types == {int}:
        number = int
    elif types <= {int, float}:
        number = float
    elif not any(isinstance(one, float) for one in numbers):
        number, scale = int, lcm(*(one.denominator for one in numbers))
        numbers = [one.numerator * (scale // one.denominator) for one in numbers]
    return Ticks(numbers[:-2], numbers[-2], numbers[-1], scale, number)
