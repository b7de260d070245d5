"""`Program`: the actions of every rank of a pipeline, in order, as data.

Chapter: book/pp/gpipe.  In: rows of text or lists of actions.  Out: an immutable `Program`.
An action is one kind of work on one microbatch by one stage, in torch's notation: `2F0` is the forward of microbatch 0
on stage 2.  A program is plain (work alone) or lowered (with sends and receives, see `dualpipe_lab.pp.lowering`).
  F  forward                            SEND_F, RECV_F   an activation leaves this stage / arrives for this stage
  B  the full backward (I, then W)      SEND_B, RECV_B   a gradient leaves this stage / arrives for this stage
  I  backward for the input
  W  backward for the weights           (0F7;7B3)OVERLAP_F_B   a forward and a backward in one overlapped pair
Elsewhere: torch.distributed.pipelining `_Action` and its CSV rows; d9d actions.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

F, B, I, W = "F", "B", "I", "W"  # noqa: E741 - the letters of the papers
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
WORK_KINDS = (F, B, I, W)
MESSAGE_KINDS = (SEND_F, RECV_F, SEND_B, RECV_B)

_ACTION = re.compile(r"([0-9]+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)([0-9]+)")
_OVERLAP = re.compile(r"\(([0-9]+)F([0-9]+);([0-9]+)([BI])([0-9]+)\)OVERLAP_F_B")
_ROW_LABEL = re.compile(r"\s*rank\s+([0-9]+)\s*:")


class Action(NamedTuple):
    """One kind of work on one microbatch by one stage.

    >>> str(Action(2, F, 0)), str(Action(1, RECV_F, 3))
    ('2F0', '1RECV_F3')
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward (B or I) that one rank runs as an overlapped pair, F&B.

    >>> str(Overlap(Action(0, F, 7), Action(7, B, 3)))
    '(0F7;7B3)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


ProgramStep: TypeAlias = Action | Overlap
Cell: TypeAlias = tuple[int, int]  # (stage, microbatch)


def parse_action(token: str) -> ProgramStep:
    """Read one action or overlapped pair; ValueError for any other text, also for trailing characters."""
    if match := _ACTION.fullmatch(token):
        return Action(int(match[1]), match[2], int(match[3]))
    if match := _OVERLAP.fullmatch(token):
        return Overlap(Action(int(match[1]), F, int(match[2])), Action(int(match[3]), match[4], int(match[5])))
    raise ValueError(
        f"{token!r} is not an action; write stage, kind and microbatch, such as 2F0 or 1RECV_F3 (kinds "
        f"{' '.join(WORK_KINDS + MESSAGE_KINDS)}), or an overlapped pair, such as (0F7;7B3)OVERLAP_F_B"
    )


def actions_of(step: ProgramStep) -> tuple[Action, ...]:
    """Return the action of a step, or both actions of an overlapped pair, forward first."""
    return (step,) if isinstance(step, Action) else step


class Program:
    """The list of steps of every rank, in order; immutable, comparable, printable.

    `name` is a title only: programs are equal if their ranks, stages and microbatches are equal.
    `num_stages` and `num_microbatches` default to one more than the largest index that occurs; a builder states them,
    so that `validate` finds an index out of range.
    `num_directions` is the largest number of routes (the rank of every stage, in order) that the microbatches may take:
    1 where each stage is on one rank, 2 for DualPipe, None for any number; `validate` checks it.
    Raises TypeError for a step that is neither an `Action` nor an `Overlap`.

    >>> program = Program.parse("two ranks", ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    >>> program.num_ranks, program.num_stages, program.num_microbatches, program.rank_of(1, 0)
    (2, 2, 2, 1)
    >>> print(program)
    # two ranks: 2 ranks, 2 stages, 2 microbatches
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    >>> Program.parse("again", str(program)) == program
    True
    """

    def __init__(
        self,
        name: str,
        ranks: Iterable[Iterable[ProgramStep]],
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        num_directions: int | None = None,
    ) -> None:
        self.name, self.num_directions = name, num_directions
        self.ranks: tuple[tuple[ProgramStep, ...], ...] = tuple(tuple(steps) for steps in ranks)
        self._stated = (num_stages, num_microbatches)
        # Set by validate(), as entries (rank, end position): a program never changes, so it is computed once.
        self.feasible_order: list[tuple[int, int]] | None = None
        for rank, steps in enumerate(self.ranks):
            if not set(map(type, steps)) <= {Action, Overlap}:
                position = next(i for i, step in enumerate(steps) if type(step) not in (Action, Overlap))
                raise TypeError(
                    f"rank {rank}, position {position}: {steps[position]!r} is not an Action or an Overlap; "
                    "use Program.parse for rows of text"
                )

    @classmethod
    def parse(cls, name: str, rows: str | Sequence[str]) -> "Program":
        """Read one row of actions per rank, or the full text that `str(program)` prints.

        A row may start with `rank 3:`.  In a full text, empty lines and lines that start with # are skipped.
        Raises ValueError with rank, position and token.
        """
        if isinstance(rows, str):
            rows = [line for line in rows.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        return cls(name, [_parse_row(rank, row) for rank, row in enumerate(rows)])

    def with_ranks(self, ranks: Iterable[Iterable[ProgramStep]]) -> "Program":
        """Return a program with these steps and the name, counts and directions of this program."""
        return Program(self.name, ranks, self.num_stages, self.num_microbatches, self.num_directions)

    def rows(self) -> list[str]:
        """Return one line of text per rank, in the form that `parse` reads."""
        return [" ".join(map(str, steps)) for steps in self.ranks]

    @property
    def num_ranks(self) -> int:
        """The number of ranks, also those without actions."""
        return len(self.ranks)

    @cached_property
    def num_stages(self) -> int:
        """The number of stages: as given, or one more than the largest index."""
        return self._stated[0] if self._stated[0] is not None else 1 + max((a.stage for a in self), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        """The number of microbatches: as given, or one more than the largest index."""
        return self._stated[1] if self._stated[1] is not None else 1 + max((a.microbatch for a in self), default=-1)

    @cached_property
    def placement(self) -> dict[Cell, int]:
        """The rank that runs the forward of each (stage, microbatch).

        DualPipe places every stage on two ranks, one per direction; all other schedules place a stage on one rank.
        """
        return {
            (stage, microbatch): rank
            for rank in range(self.num_ranks)
            for stage, kind, microbatch in self.actions(rank)
            if kind == F
        }

    @cached_property
    def holders(self) -> dict[int, tuple[int, ...]]:
        """The ranks that hold each stage; two of them are mirrors.

        >>> Program.parse("two stages", ["0F0 0B0", "1F0 1B0"]).holders
        {0: (0,), 1: (1,)}
        """
        found: dict[int, set[int]] = {}
        for (stage, _), rank in self.placement.items():
            found.setdefault(stage, set()).add(rank)
        return {stage: tuple(sorted(ranks)) for stage, ranks in found.items()}

    @cached_property
    def is_lowered(self) -> bool:
        """Whether the program contains sends or receives."""
        return any(action.kind in MESSAGE_KINDS for action in self)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a stage on a microbatch; KeyError if there is none."""
        if (stage, microbatch) not in self.placement:
            raise KeyError(f"no rank of program {self.name!r} runs {stage}F{microbatch}; see program.placement")
        return self.placement[stage, microbatch]

    def actions(self, rank: int) -> Iterator[Action]:
        """Iterate over the actions of one rank in order; of a pair, the forward, then the backward."""
        return chain.from_iterable(map(actions_of, self.ranks[rank]))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that one rank holds, in the order of their numbers.

        >>> Program.parse("V", ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"]).stages_of(1)
        (1, 2)
        """
        return tuple(sorted({action.stage for action in self.actions(rank)}))

    def __iter__(self) -> Iterator[Action]:
        return chain.from_iterable(map(self.actions, range(self.num_ranks)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return self.ranks == other.ranks and self._counts() == other._counts()

    def __hash__(self) -> int:
        return hash(self.ranks)

    def _counts(self) -> tuple[int, int, int]:
        return self.num_ranks, self.num_stages, self.num_microbatches

    def __str__(self) -> str:
        ranks, stages, microbatches = self._counts()
        header = f"# {self.name}: {ranks} ranks, {stages} stages, {microbatches} microbatches"
        return "\n".join([header, *(f"rank {rank}: {row}".rstrip() for rank, row in enumerate(self.rows()))])

    def __repr__(self) -> str:
        ranks, stages, microbatches = self._counts()
        return f"<Program {self.name!r}: {ranks} ranks, {stages} stages, {microbatches} microbatches>"


def check_counts(builder: str, **counts: Any) -> None:
    """Raise ValueError unless every count, such as num_ranks, is an integer of at least 1."""
    for what, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{builder} needs {what} to be an integer of at least 1, got {value!r}; use {what}=1 or more"
            )


def _parse_row(rank: int, row: str) -> list[ProgramStep]:
    if label := _ROW_LABEL.match(row):
        if int(label[1]) != rank:
            raise ValueError(f"row {rank} is labelled rank {label[1]}; list the rows in rank order, from 0")
        row = row[label.end() :]
    steps = []
    for position, token in enumerate(row.split()):
        try:
            steps.append(parse_action(token))
        except ValueError as error:
            raise ValueError(f"rank {rank}, position {position}: {error}") from None
    return steps
