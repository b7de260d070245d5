"""Slow and plain: the timing rules of the simulator, iterated until nothing changes; and random legal programs."""

import random
from fractions import Fraction

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Action, Overlap, Program, actions_of


def makers(action, num_stages):
    """The actions of which one makes the input of this action."""
    stage, kind, microbatch = action
    if kind == "F" and stage > 0:
        return [(stage - 1, "F", microbatch)]
    if kind in "BI" and stage < num_stages - 1:
        return [(stage + 1, "B", microbatch), (stage + 1, "I", microbatch)]
    return []


def solve(program: Program, cost: Cost) -> dict[tuple, tuple]:
    """(start, end) of every action: all starts are 0 at first and grow until every rule holds."""
    place = {a: (r, i) for r, steps in enumerate(program.ranks) for i, s in enumerate(steps) for a in actions_of(s)}
    table = cost.per_stage(program.num_stages)
    starts = [[0] * len(steps) for steps in program.ranks]

    def ticks(step):
        return cost.of_pair(step, table) if isinstance(step, Overlap) else table[step.kind][step.stage]

    def end(rank, index):
        return starts[rank][index] + ticks(program.ranks[rank][index])

    def consumers(action):
        return [other for other in place if tuple(action) in makers(other, program.num_stages)]

    links = {}  # (src, dst) -> (action, the action that uses it) in the order of making
    for steps in program.ranks:
        for step in steps:
            for action in actions_of(step):
                for other in consumers(action):
                    if place[action][0] != place[other][0]:
                        links.setdefault((place[action][0], place[other][0]), []).append((action, other))
    while True:
        arrivals = {}
        for queue in links.values():
            free = 0
            for action, other in queue:
                free = max(free, end(*place[action])) + cost.transfer
                arrivals[other] = free + cost.latency
        before = [list(row) for row in starts]
        for rank, steps in enumerate(program.ranks):
            for index, step in enumerate(steps):
                bounds = [end(rank, index - 1) if index else 0]
                for action in actions_of(step):
                    if action in arrivals:
                        bounds.append(arrivals[action])
                    bounds += [end(*place[m]) for m in makers(action, program.num_stages) if m in place]
                starts[rank][index] = max(bounds)
        if starts == before:
            return {a: (starts[r][i], end(r, i)) for a, (r, i) in place.items()}


def how_far(program: Program) -> int:
    """Let any rank take any step whose inputs exist until none can; return how many actions ran."""
    done, position, moved = set(), [0] * program.num_ranks, True
    while moved:
        moved = False
        for rank, steps in enumerate(program.ranks):
            here = actions_of(steps[position[rank]]) if position[rank] < len(steps) else ()
            if here and all(ready(action, done, program.num_stages) for action in here):
                done.update(here)
                position[rank] += 1
                moved = True
    return len(done)


def runs_to_its_end(program: Program) -> bool:
    """Whether all actions ran."""
    return how_far(program) == sum(1 for _ in program)


def ready(action, done, num_stages) -> bool:
    stage, kind, microbatch = action
    before = {"F": [], "B": ["F"], "I": ["F"], "W": ["I"]}[kind]
    own = all((stage, kind, microbatch) in done for kind in before)
    inputs = makers(action, num_stages)
    return own and (not inputs or any(maker in done for maker in inputs))


def random_program(rng: random.Random) -> Program:
    """A legal program of random shape: one or two stages per rank, in a line, a loop, a V, or in two directions."""
    num_ranks, num_microbatches = rng.randint(1, 4), rng.randint(1, 5)
    shape = rng.choice(["line", "loop", "v", "two directions"])
    num_stages = num_ranks * (2 if shape in ("loop", "v") else 1)

    def home(stage, microbatch):
        mirrored = 2 * num_ranks - 1 - stage if shape == "v" else num_ranks - 1 - stage
        turned = (shape == "v" and stage >= num_ranks) or (shape == "two directions" and microbatch % 2)
        return mirrored if turned else stage % num_ranks

    cells = [(stage, microbatch) for stage in range(num_stages) for microbatch in range(num_microbatches)]
    todo = set()
    for stage, microbatch in cells:
        todo |= {Action(stage, kind, microbatch) for kind in rng.choice(["FB", "FIW"])}
    ranks, done = [[] for _ in range(num_ranks)], set()
    while todo:
        choice = rng.choice(sorted(action for action in todo if ready(action, done, num_stages)))
        rank = home(choice.stage, choice.microbatch)
        step = choice
        if choice.kind == "F" and rng.random() < 0.4:
            partners = [a for a in todo if a.kind in "BI" and ready(a, done, num_stages) and home(a[0], a[2]) == rank]
            step = Overlap(choice, rng.choice(sorted(partners))) if partners else choice
        ranks[rank].append(step)
        done.update(actions_of(step))
        todo -= set(actions_of(step))
    return Program(f"random {shape}", ranks) if all(ranks) else random_program(rng)


def random_cost(rng: random.Random, num_stages: int) -> Cost:
    """Costs of every shape, zero included; fractions half of the time."""
    unit = rng.choice([1, Fraction(1, rng.randint(2, 7))])

    def ticks():
        return rng.randint(0, 6) * unit

    per_stage = [[ticks() for _ in range(num_stages)] for _ in range(3)]
    return Cost(
        *rng.choice([per_stage, [ticks() for _ in range(3)]]),
        B=rng.choice([None, ticks(), {stage: ticks() for stage in range(num_stages)}]),
        overlap=rng.choice([None, ticks(), lambda pair: pair.forward.microbatch + pair.backward.stage]),
        latency=rng.choice([0, ticks()]),
        transfer=rng.choice([0, ticks()]),
    )
