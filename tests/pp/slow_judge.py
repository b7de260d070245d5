"""Right or wrong, judged by doing: the rules of `validate` as a machine that counts, sends and waits; and mutants."""

import random

from slow_reference import makers, ready

from dualpipe_lab.pp.program import Action, Overlap, Program, actions_of

WORK, MESSAGES = ("F", "B", "I", "W"), ("SEND_F", "RECV_F", "SEND_B", "RECV_B")


def is_right(program: Program, blocking=False) -> bool:
    """Whether every gradient is computed exactly once, in the right place, and the program runs to its end."""
    homes = {}  # cell -> its actions and their ranks
    for rank, steps in enumerate(program.ranks):
        for step in steps:
            if isinstance(step, Overlap) and (step[0].kind != "F" or step[1].kind not in ("B", "I")):
                return False
            for stage, kind, microbatch in actions_of(step):
                homes.setdefault((stage, microbatch), []).append((kind, rank))
    cells = {(s, m) for s in range(program.num_stages) for m in range(program.num_microbatches)}
    if not cells or set(homes) != cells or not all(program.ranks):
        return False
    home = {}
    for cell, done in homes.items():
        work = [(kind, rank) for kind, rank in done if kind in WORK]
        if sorted(kind for kind, _ in work) not in (["B", "F"], ["F", "I", "W"]) or len({r for _, r in work}) > 1:
            return False
        home[cell] = work[0][1]
    taken = {tuple(home[s, m] for s in range(program.num_stages)) for m in range(program.num_microbatches)}
    if program.num_directions is not None and len(taken) > program.num_directions:
        return False
    return _messages_fit(program, home) and _Machine(program, home).runs(blocking)


def _messages_fit(program, home) -> bool:
    """A program has no messages at all, or exactly those that cross ranks, each at the rank of its stage."""
    found = sorted((*a, rank) for rank in range(program.num_ranks) for a in program.actions(rank) if a.kind in MESSAGES)
    expected = []
    for (stage, m), rank in home.items():
        if home.get((stage + 1, m), rank) != rank:
            expected += [(stage, "SEND_F", m, rank), (stage, "RECV_B", m, rank)]
        if home.get((stage - 1, m), rank) != rank:
            expected += [(stage, "RECV_F", m, rank), (stage, "SEND_B", m, rank)]
    return not found or found == sorted(expected)


class _Machine:
    """Ranks that run their lists, with one first-in-first-out channel for each pair of them."""

    def __init__(self, program, home):
        self.program, self.home, self.lowered = program, home, any(a.kind in MESSAGES for a in program)
        self.position, self.done, self.got, self.channels = [0] * program.num_ranks, set(), set(), {}

    def next(self, rank):
        steps = self.program.ranks[rank]
        return steps[self.position[rank]] if self.position[rank] < len(steps) else None

    def runs(self, blocking) -> bool:
        moved = True
        while moved:
            moved = False
            for rank in range(self.program.num_ranks):
                step = self.next(rank)
                while step is not None and self.take(rank, step, blocking):
                    moved, step = True, self.next(rank)
        return all(self.next(rank) is None for rank in range(self.program.num_ranks))

    def take(self, rank, step, blocking) -> bool:
        """Run one step if it can run now."""
        if isinstance(step, Action) and step.kind in MESSAGES:
            able = self.meet(rank, step) if blocking else self.post(rank, step)
        else:
            able = all(self.able(action) for action in actions_of(step))
            self.done |= set(actions_of(step)) if able else set()
        self.position[rank] += able
        return able

    def able(self, action) -> bool:
        stage, kind, m = action
        sources = {self.home[maker.stage, m] for maker in map(Action._make, makers(action, self.program.num_stages))}
        message = ("RECV_" + ("F" if kind == "F" else "B"), stage, m)
        crosses = self.lowered and sources - {self.home[stage, m]}
        there = not crosses or message in self.got or self.posted_and_sent(message)
        return there and ready(action, self.done, self.program.num_stages)

    def post(self, rank, message) -> bool:
        """Send a message into its channel, or post the receive at its other end; neither waits for the other."""
        stage, kind, m = message
        peer = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
        if kind.startswith("SEND") and not self.made(message):
            return False
        link = (rank, self.home[peer, m]) if kind.startswith("SEND") else (self.home[peer, m], rank)
        name = ("RECV" + kind[4:], peer, m) if kind.startswith("SEND") else (kind, stage, m)
        self.channels.setdefault(link, {"SEND": [], "RECV": []})[kind[:4]].append(name)
        return True

    def posted_and_sent(self, message) -> bool:
        """Whether the message went into its channel as the same one in line as its receive was posted."""
        return any(
            (message, message) in zip(ends["SEND"], ends["RECV"], strict=False) for ends in self.channels.values()
        )

    def meet(self, rank, message) -> bool:
        """Both ends at once: only a sender whose receiver stands before the other end goes on."""
        stage, kind, m = message
        if kind.startswith("RECV"):
            return False
        peer = stage + (1 if kind == "SEND_F" else -1)
        other_end = ("RECV" + kind[4:], peer, m)
        waits = self.next(self.home[peer, m]) == (peer, other_end[0], m)
        if not waits or not self.made(message):
            return False
        self.position[self.home[peer, m]] += 1
        self.got.add(other_end)
        return True

    def made(self, message) -> bool:
        stage, kind, m = message
        return any((stage, maker, m) in self.done for maker in ("F" if kind == "SEND_F" else "BI"))


def most_held(program: Program) -> list[int]:
    """Per rank, the most (stage, microbatch) pairs between the start of F and the end of B or W."""
    peaks = []
    for rank in range(program.num_ranks):
        held, peak = set(), 0
        for step in program.ranks[rank]:
            held |= {(a.stage, a.microbatch) for a in actions_of(step) if a.kind == "F"}
            peak = max(peak, len(held))
            held -= {(a.stage, a.microbatch) for a in actions_of(step) if a.kind in "BW"}
        peaks.append(peak)
    return peaks


def mutant(rng: random.Random, program: Program) -> Program:
    """Swap two steps, drop, repeat or move one, or change a stage, a kind or a microbatch."""
    rows = [list(steps) for steps in program.ranks]
    row, other = rng.choice(rows), rng.choice(rows)
    here, there = rng.randrange(len(row)), rng.randrange(len(other))
    how = rng.choice(["swap", "swap here", "drop", "repeat", "move", "stage", "kind", "microbatch"])
    if how == "swap":
        row[here], other[there] = other[there], row[here]
    elif how == "swap here":
        there = rng.randrange(len(row))
        row[here], row[there] = row[there], row[here]
    elif how == "drop":
        del row[here]
    elif how == "repeat":
        other.insert(there, row[here])
    elif how == "move":
        row.insert(rng.randrange(len(row)), row.pop(here))
    else:
        row[here] = _changed(rng, row[here], how, program)
    return program.with_ranks(rows)


def _changed(rng, step, what, program):
    if isinstance(step, Overlap):
        which = rng.randrange(2)
        parts = list(step)
        parts[which] = _changed(rng, parts[which], what, program)
        return Overlap(*parts)
    values = {
        "stage": range(-1, program.num_stages + 1),
        "kind": WORK + (MESSAGES if program.is_lowered else ()),
        "microbatch": range(-1, program.num_microbatches + 1),
    }
    return step._replace(**{what: rng.choice(values[what])})
