"""`ActionIndex`: rank and position of every action of a program; checks that the work is complete and in order."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice
from operator import itemgetter
from typing import TypeAlias

from dualpipe_lab.pp.program import MESSAGE_KINDS, WORK_KINDS, Action, B, F, I, Overlap, Program, W
from dualpipe_lab.pp.validation.errors import ProblemList, listing

Key: TypeAlias = tuple[int, str, int]  # an Action, or a tuple that equals one
Location: TypeAlias = tuple[int, int]  # rank, position in the rank's list

_BEFORE = {B: F, I: F, W: I}  # on one stage and microbatch: what has to run before


class ActionIndex:
    """Rank and position of every action, as one number each: rank * stride + position.

    Attributes:
        number: the number of each action; actions of a pair share one.
        count: how many actions of each kind there are.
    """

    def __init__(self, program: Program) -> None:
        self.stride = 1 + max(map(len, program.ranks), default=0)
        self.number: dict[Key, int] = {}
        self.count: Counter[str] = Counter()  # actions of each kind

    def locate(self, action: Key) -> Location:
        """Return rank and position of an action; KeyError if the program does not have it."""
        return divmod(self.number[action], self.stride)

    def backward(self, stage: int, microbatch: int) -> Action:
        """Return the action that makes the gradient of a stage's input: B, or I where the backward is split."""
        full = Action(stage, B, microbatch)
        return full if full in self.number else Action(stage, I, microbatch)


def index_actions(program: Program, problems: ProblemList) -> ActionIndex:
    """Locate every action; report duplicates, unknown kinds, broken pairs and indices out of range."""
    index = ActionIndex(program)
    number = index.number
    if not program.ranks:
        problems.add("it has no ranks; give it at least one row of actions")
    for rank, steps in enumerate(program.ranks):
        if not steps:
            problems.add(f"rank {rank} has no actions; give it a stage or use fewer ranks")
        for here, step in enumerate(steps, rank * index.stride):
            for action in (step,) if isinstance(step, Action) else step:
                if number.setdefault(action, here) != here or (
                    isinstance(step, Overlap) and step.forward == step.backward
                ):
                    text = "rank {}, position {}: {} runs again, it ran at rank {}, position {}; keep one"
                    problems.add(text.format(*divmod(here, index.stride), action, *index.locate(action)))
    index.count = Counter(map(itemgetter(1), number))
    _check_kinds(program, index, problems)
    _check_indices(program, index, problems)
    return index


def _check_kinds(program: Program, index: ActionIndex, problems: ProblemList) -> None:
    unknown = index.count.keys() - {*WORK_KINDS, *MESSAGE_KINDS}
    for rank, steps in enumerate(program.ranks):
        for position, step in enumerate(steps):
            if isinstance(step, Overlap):
                if step.forward.kind != F or step.backward.kind not in (B, I):
                    problems.add(
                        f"rank {rank}, position {position}: {step} must pair an F with a B or I, in this order"
                    )
            elif unknown and step.kind in unknown:
                problems.add(f"rank {rank}, position {position}: {step} is of the unknown kind {step.kind!r}")


def _check_indices(program: Program, index: ActionIndex, problems: ProblemList) -> None:
    stages, microbatches = {action[0] for action in index.number}, {action[2] for action in index.number}
    for what, field, present, count in (
        ("stage", 0, stages, program.num_stages),
        ("microbatch", 2, microbatches, program.num_microbatches),
    ):
        stray = {value for value in present if not 0 <= value < count}
        for action in index.number if stray else ():
            if action[field] in stray:
                where = "rank {}, position {}".format(*index.locate(action))
                problems.add(f"{where}: {Action(*action)} has {what} {action[field]}, out of range 0..{count - 1}")


def check_work(program: Program, index: ActionIndex, problems: ProblemList) -> None:
    """Check that each stage runs each microbatch on one rank: one F, then one B, or else one I, then one W."""
    number, stride = index.number, index.stride
    count = index.count
    num_cells = program.num_stages * program.num_microbatches
    if not (num_cells == count[F] == count[B] + count[I] > 0 and count[I] == count[W]):
        _explain_incomplete(program, index, problems)
        return
    for action, late in number.items():
        stage, kind, microbatch = action
        if kind in _BEFORE:
            needed = (stage, _BEFORE[kind], microbatch)
            early = number.get(needed)
            if early is None or (kind == I and (stage, B, microbatch) in number):
                _explain_incomplete(program, index, problems)
                return
            if early >= late or early // stride != late // stride:
                _explain_order(Action(*needed), divmod(early, stride), Action(*action), divmod(late, stride), problems)


def _explain_incomplete(program: Program, index: ActionIndex, problems: ProblemList) -> None:
    work = [action for action in index.number if action[1] in WORK_KINDS]
    stages, microbatches = {action[0] for action in work}, {action[2] for action in work}
    _check_gaps("stages", stages, program.num_stages, problems)
    _check_gaps("microbatches", microbatches, program.num_microbatches, problems)
    kinds: defaultdict[tuple[int, int], str] = defaultdict(str)
    for stage, kind, microbatch in work:
        kinds[microbatch, stage] += kind
    lacking: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for microbatch in microbatches:
        for stage in stages:
            if lack := _lack(kinds.get((microbatch, stage), "")):
                lacking[microbatch, lack].append(stage)
    for (microbatch, lack), where in sorted(lacking.items()):
        problems.add(f"stage{'s' * (len(where) > 1)} {listing(where)}, microbatch {microbatch}: {lack}")


def _check_gaps(what: str, present: set[int], count: int, problems: ProblemList) -> None:
    # The largest index may be a slip as large as 10**9: look for the first gaps only.
    for gap in islice((number for number in range(count) if number not in present), 3):
        problems.add(f"{what} run from 0 to {count - 1}, but no rank runs {gap}; number them from 0 without gaps")


def _lack(kinds: Iterable[str]) -> str:
    """Return what one stage's work on one microbatch lacks.

    >>> _lack("WIF"), _lack("FI"), _lack("FBW")
    ('', 'I without W, so its weight gradient is never computed', 'B and W, so a gradient is computed twice')
    """
    ordered = "".join(kind for kind in WORK_KINDS if kind in kinds)
    if ordered in ("FB", "FIW"):
        return ""
    if not ordered:
        return "no work at all (is a microbatch index out of range?)"
    if F not in ordered:
        return f"{' and '.join(ordered)} without F"
    if ordered == F:
        return "F without a backward"
    if B in ordered:
        return f"{' and '.join(ordered[1:])}, so a gradient is computed twice"
    if W in ordered:
        return "W without I, so the stage before never gets its gradient"
    return "I without W, so its weight gradient is never computed"


def _explain_order(one: Action, early: Location, other: Action, late: Location, problems: ProblemList) -> None:
    if early[0] != late[0]:
        problems.add(f"{one} is on rank {early[0]} and {other} on rank {late[0]}; what {one} keeps is needed there")
    elif early == late:
        problems.add(f"rank {late[0]}, position {late[1]}: {other} needs the result of {one}, they cannot be a pair")
    else:
        problems.add(
            f"rank {late[0]}: {other} (position {late[1]}) comes before {one} (position {early[1]}), "
            "whose result it needs; swap them"
        )
