"""The rules of a valid program: complete work in order, few routes, matched messages; and the list of what is wrong.

In: a `Program`, plain or lowered.  Out: problems, collected first and reported at once by `InvalidProgram`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter, ne
from typing import NamedTuple, TypeAlias

from dualpipe_lab.pp.program import (
    MESSAGE_KINDS,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WORK_KINDS,
    Action,
    B,
    F,
    I,
    Overlap,
    Program,
    W,
    actions_of,
)

Key: TypeAlias = tuple[int, str, int]  # an Action, or a tuple that equals one
Location: TypeAlias = tuple[int, int]  # rank, position in the rank's list
Route: TypeAlias = tuple[int, ...]  # the rank of every stage, in order

MAX_LISTED = 12


class InvalidProgram(ValueError):  # noqa: N818 - a name to read aloud
    """A program that deadlocks, or does not compute every gradient exactly once; `problems` lists why."""

    def __init__(self, name: str, problems: Sequence[str], total: int) -> None:
        self.problems, self.total = tuple(problems), total
        lines = [f"  - {problem}" for problem in problems]
        if total > len(problems):
            lines.append(f"  - and {total - len(problems)} more")
        count = "1 problem" if total == 1 else f"{total} problems"
        super().__init__("\n".join([f"program {name!r} has {count}:", *lines]))
        self._arguments = (name, self.problems, total)

    def __reduce__(self) -> tuple[type["InvalidProgram"], tuple[str, tuple[str, ...], int]]:
        return type(self), self._arguments  # so that it crosses process borders


class ProblemList:
    """A bounded list of problems: the first `MAX_LISTED` are kept, the others counted."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self.total = 0

    def add(self, problem: str) -> None:
        """Add a problem, unless it is listed already."""
        if problem in self.listed:
            return
        self.total += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(problem)

    def raise_if_any(self, program: Program) -> None:
        """Raise InvalidProgram if the list has a problem."""
        if self.total:
            raise InvalidProgram(program.name, self.listed, self.total)


def listing(numbers: Iterable[int], most: int = 6) -> str:
    """Write numbers in ascending order, at most `most` of them.

    >>> listing([3, 1, 2]), listing(range(10), most=3)
    ('1, 2, 3', '0, 1, 2 and 7 more')
    """
    ordered = sorted(numbers)
    shown = ", ".join(map(str, ordered[:most]))
    return shown if len(ordered) <= most else f"{shown} and {len(ordered) - most} more"


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
    number, stride, count = index.number, index.stride, index.count
    num_cells = program.num_stages * program.num_microbatches
    is_complete = num_cells == count[F] == count[B] + count[I] > 0 and count[I] == count[W]
    for action, late in number.items():  # what is out of order comes first: a list of what is missing may be long
        stage, kind, microbatch = action
        if kind in _BEFORE:
            needed = (stage, _BEFORE[kind], microbatch)
            early = number.get(needed)
            if early is None or (kind == I and (stage, B, microbatch) in number):
                is_complete = False
            elif early >= late or early // stride != late // stride:
                _explain_order(Action(*needed), divmod(early, stride), Action(*action), divmod(late, stride), problems)
    if not is_complete:
        _explain_incomplete(program, index, problems)


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
        return "no work at all; put in its F and B"
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


def routes(program: Program) -> list[Route]:
    """Return the route of every microbatch of a complete program.

    >>> routes(Program.parse("two directions", ["0F0 1F1 0B0 1B1", "0F1 1F0 0B1 1B0"]))
    [(0, 1), (1, 0)]
    """
    stages, place = range(program.num_stages), program.placement
    return [tuple([place[stage, microbatch] for stage in stages]) for microbatch in range(program.num_microbatches)]


def check_routes(program: Program, problems: ProblemList) -> None:
    """Report routes beyond the number that the program states, the rarest first.

    DualPipe has two: every stage has a copy on a second rank.  A microbatch that changes its direction has a route of
    its own, and its gradient is right once the copies are summed; so a program that states no number may have any.
    """
    stated = program.num_directions
    if stated is None:
        return
    taken = routes(program)
    often = [route for route, _ in Counter(taken).most_common(stated)]
    for microbatch, route in enumerate(taken):
        if route not in often:
            nearest = min(often, key=lambda known: sum(map(ne, route, known)))
            stage = next(s for s, rank in enumerate(route) if rank != nearest[s])
            allowed = "every stage on one rank" if stated == 1 else f"no more than {stated} routes"
            problems.add(
                f"stage {stage} works on microbatch {microbatch} on rank {route[stage]}, on microbatch "
                f"{taken.index(nearest)} on rank {nearest[stage]}; num_directions={stated} allows {allowed}: move it "
                f"there, or state num_directions={1 + stated}"
            )


class RequiredMessage(NamedTuple):
    """One message that a program needs: its send and its receive, and the actions that make and use it."""

    send: Action
    recv: Action
    made_by: Action
    used_by: Action


def strip(program: Program) -> Program:
    """Return the program without its sends and receives.

    >>> print(strip(Program.parse("one", ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"])))
    # one: 2 ranks, 2 stages, 1 microbatches
    rank 0: 0F0 0B0
    rank 1: 1F0 1B0
    """
    kept = [[s for s in steps if actions_of(s)[0].kind not in MESSAGE_KINDS] for steps in program.ranks]
    return program.with_ranks(kept)


def required_messages(program: Program, index: ActionIndex) -> list[RequiredMessage]:
    """Return every message between two ranks; neighbouring stages on one rank need none."""
    needed = []
    for (stage, m), rank in program.placement.items():
        if stage + 1 < program.num_stages and program.placement[stage + 1, m] != rank:
            near, far = Action(stage, F, m), Action(stage + 1, F, m)
            needed.append(RequiredMessage(Action(stage, SEND_F, m), Action(stage + 1, RECV_F, m), near, far))
            near, far = index.backward(stage, m), index.backward(stage + 1, m)
            needed.append(RequiredMessage(Action(stage + 1, SEND_B, m), Action(stage, RECV_B, m), far, near))
    return needed


def check_messages(program: Program, index: ActionIndex, problems: ProblemList) -> None:
    """Check the sends and receives of a lowered program whose work is complete."""
    needed = required_messages(program, index)
    for message in needed:
        _check_end(message.send, message.made_by, index, problems, after=True)
        _check_end(message.recv, message.used_by, index, problems, after=False)
    expected = {end for message in needed for end in (message.send, message.recv)}
    for action in index.number:
        if action[1] in MESSAGE_KINDS and action not in expected:
            where = "rank {}, position {}".format(*index.locate(action))
            problems.add(f"{where}: {Action(*action)} has no other end on another rank; remove it")
    if not problems.total:
        _check_links(needed, index, problems)


def _check_end(message: Action, work: Action, index: ActionIndex, problems: ProblemList, after: bool) -> None:
    rank, position = index.locate(work)
    belongs = f"it belongs {'after' if after else 'before'} {work} (rank {rank}, position {position})"
    if message not in index.number:
        problems.add(f"{message} is missing; {belongs}")
        return
    where = index.locate(message)
    if where[0] != rank or (where[1] < position) is after:
        problems.add(f"rank {where[0]}, position {where[1]}: {message} is in the wrong place; {belongs}")


def _check_links(needed: list[RequiredMessage], index: ActionIndex, problems: ProblemList) -> None:
    """Both ends of a link need one order, because NCCL has no tags."""
    links: defaultdict[tuple[int, int], list[RequiredMessage]] = defaultdict(list)
    for message in needed:
        links[index.locate(message.send)[0], index.locate(message.recv)[0]].append(message)
    for (src, dst), messages in links.items():
        in_sending = sorted(messages, key=lambda message: index.number[message.send])
        in_receiving = sorted(messages, key=lambda message: index.number[message.recv])
        for sent, received in zip(in_sending, in_receiving, strict=True):
            if sent != received:
                problems.add(
                    f"rank {src} sends {sent.send} where rank {dst} expects the other end of {received.recv}; messages "
                    "between two ranks arrive in the order of sending, so send and receive them in one order"
                )
                break


def check_in_order(program: Program, index: ActionIndex, problems: ProblemList) -> None:
    """Check that any two ranks launch the messages between them, those of both directions together, in one order.

    NCCL completes everything between two ranks in the order in which each rank launches it.  Two ranks with one order
    never wait for each other by this rule; the waits between actions are those of buffered messages.
    """
    ends: defaultdict[tuple[int, int], list[tuple[Action, Action]]] = defaultdict(list)
    for send, recv, _, _ in required_messages(program, index):
        src, dst = index.locate(send)[0], index.locate(recv)[0]
        ends[min(src, dst), max(src, dst)].append((send, recv) if src < dst else (recv, send))
    for (rank, other), messages in ends.items():
        first = sorted(messages, key=lambda pair: index.number[pair[0]])
        second = sorted(messages, key=lambda pair: index.number[pair[1]])
        for place, ((here, _), (_, there)) in enumerate(zip(first, second, strict=True)):
            if first[place] != second[place]:
                problems.add(
                    f"deadlock in order: message {place} between ranks {rank} and {other} is {here} for rank {rank} "
                    f"(position {index.locate(here)[1]}) and {there} for rank {other} (position "
                    f"{index.locate(there)[1]}); NCCL has no tags and completes the messages between two ranks in the "
                    "order of their launch; lower() the program anew"
                )
                break
