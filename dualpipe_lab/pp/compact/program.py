"""`CompactProgram`: a plain program as integer arrays, about 10 bytes per action.

Chapter: book/pp/gpipe.  In: a `Program`, or arrays of a builder.  Out: arrays that do not change, and what follows from
them: the source of every input, an order of execution, the peak of live activations.
  arrays     one entry per action, rank after rank; a pair is its forward followed by its backward
  found once, when first needed: the checks of `validate`, the sources of all inputs, and an order of execution
A lowered program loses its sends and receives, which take no time (rule 5 of `dualpipe_lab.pp.simulator`).
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

from dualpipe_lab.pp.compact.action_arrays import ActionArrays
from dualpipe_lab.pp.compact.arrays import IS_F, IS_I, NUMBER, Flags, Ints
from dualpipe_lab.pp.compact.check import Wiring, check_work
from dualpipe_lab.pp.compact.costs import Work, classify
from dualpipe_lab.pp.compact.order import Execution, find_execution
from dualpipe_lab.pp.compact.slots import Slots, number_slots
from dualpipe_lab.pp.compact.stages import Count, Passes, count_actions, find_passes
from dualpipe_lab.pp.program import Action, Overlap, Program, ProgramStep, actions_of
from dualpipe_lab.pp.validation.errors import InvalidProgram
from dualpipe_lab.pp.validation.messages import strip
from dualpipe_lab.pp.validation.validator import validate


@dataclass(frozen=True, eq=False)
class CompactProgram(ActionArrays):
    """The actions of every rank, in order, as arrays with one entry per action.

    Attributes:
        name: a title; it is not compared.
        num_stages, num_microbatches, num_directions: as in `Program`.
        offsets: the actions of rank r are those from offsets[r] up to offsets[r + 1].
        kind: the place of the kind in `WORK_KINDS`: F 0, B 1, I 2, W 3.
        stage, microbatch: of each action.
        second: whether the action is the backward of an overlapped pair; the action before it is the pair's forward.
    The arrays become read-only.

    >>> from dualpipe_lab.pp.schedules import one_f_one_b
    >>> compact = CompactProgram.of(one_f_one_b(2, 2))
    >>> compact.num_actions, compact.kind.tolist(), compact.to_program() == one_f_one_b(2, 2)
    (8, [0, 0, 1, 1, 0, 1, 0, 1], True)

    Raises:
        ValueError: arrays of different lengths, or offsets that do not divide them among the ranks.
    """

    @classmethod
    def of(cls, program: Program) -> "CompactProgram":
        """Return the compact form of a program, checked.

        Raises InvalidProgram, as `validate` does, for a program that is incomplete or would deadlock.
        """
        with suppress(InvalidProgram, KeyError, OverflowError):  # a kind or an index that the arrays do not hold
            return _converted(program).check()
        validate(program)  # it says more than the check: all problems, and what to move
        assert program.is_lowered, program
        return _converted(strip(program)).check()

    def check(self) -> "CompactProgram":
        """Return the program if it is complete and ends; InvalidProgram with the actions in question otherwise."""
        _ = self.execution
        return self

    @cached_property
    def wiring(self) -> Wiring:
        """The source of each action's input and the rank that needs its result; InvalidProgram if work is missing."""
        return check_work(self)

    @cached_property
    def execution(self) -> Execution:
        """An order in which the actions can run; InvalidProgram if the ranks wait for each other."""
        return find_execution(self, self.wiring.source)

    @cached_property
    def work(self) -> Work:
        """The class of each step's cost."""
        return classify(self)

    @cached_property
    def slots(self) -> Slots:
        """The actions in the order of execution, with numbered results."""
        return self.slots_of(self.execution)

    def slots_of(self, execution: Execution) -> Slots:
        """Return the slots of any order of execution."""
        return number_slots(self, execution, self.wiring, self.passes)

    @cached_property
    def counts(self) -> tuple[tuple[Count, ...], ...]:
        """For each rank, the number of its actions by stage and kind, in the order in which it begins them."""
        return count_actions(self)

    @cached_property
    def passes(self) -> Passes:
        """The first forward and the last backward of each stage of each rank."""
        return find_passes(self)

    @cached_property
    def peaks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each rank, the peak of live activations and the position of the step that first reaches it.

        No cost changes either: on a rank, activations are made and freed in the order of its steps.
        """
        import numpy as np

        starts = self.offsets[:-1]
        change = np.where(self.kind == IS_F, 1, np.where(self.kind == IS_I, 0, -1)).astype(np.int32)
        live = np.cumsum(change, dtype=np.int32)  # every rank ends with 0
        most = np.maximum.reduceat(live, starts)
        reached = np.flatnonzero(live == np.repeat(most, np.diff(self.offsets)))
        first = reached[np.searchsorted(reached, starts)]
        return tuple(most.tolist()), tuple(self.locate(int(action))[1] for action in first)

    def to_program(self) -> Program:
        """Return the program; it takes about 200 bytes per action."""
        ranks = [self._steps(start, end) for start, end in pairwise(self.offsets.tolist())]
        return Program(self.name, ranks, self.num_stages, self.num_microbatches, self.num_directions)

    def _steps(self, start: int, end: int) -> list[ProgramStep]:
        steps: list[ProgramStep] = []
        for index in range(start, end):
            action = self.action(index)
            if self.second[index]:
                forward = steps.pop()
                assert isinstance(forward, Action)
                steps.append(Overlap(forward, action))
            else:
                steps.append(action)
        return steps

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompactProgram):
            return NotImplemented
        import numpy as np

        mine, others = self._compared(), other._compared()
        return mine[0] == others[0] and all(map(np.array_equal, mine[1:], others[1:]))

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def _compared(self) -> tuple[tuple[int, int], Ints, Ints, Ints, Ints, Flags]:
        sizes = self.num_stages, self.num_microbatches
        return sizes, self.offsets, self.kind, self.stage, self.microbatch, self.second

    def __repr__(self) -> str:
        sizes = f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        return f"<CompactProgram {self.name!r}: {sizes}>"


def _converted(program: Program) -> CompactProgram:
    import numpy as np

    rows = [[action for step in steps for action in actions_of(step)] for steps in program.ranks]
    stage, kind, microbatch = zip(*chain.from_iterable(rows), strict=True) if any(rows) else ((), (), ())
    second = [flag for steps in program.ranks for step in steps for flag in _FLAGS[type(step)]]
    return CompactProgram(
        program.name,
        program.num_stages,
        program.num_microbatches,
        np.cumsum([0, *map(len, rows)]),
        np.array([NUMBER[letter] for letter in kind], np.int8),
        np.array(stage, np.int32),
        np.array(microbatch, np.int32),
        np.array(second, np.bool_),
        program.num_directions,
    )


_FLAGS: dict[type, tuple[bool, ...]] = {Action: (False,), Overlap: (False, True)}
