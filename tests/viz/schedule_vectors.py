"""Programs on which the studio's core has to say what the library says: the registry's, and some broken by edits."""

import random
from itertools import chain

from dualpipe_lab import Program, schedules
from dualpipe_lab.pp.lowering import strip
from dualpipe_lab.pp.program import Action, Overlap, actions_of
from dualpipe_lab.pp.validation.deadlock import UntimedRun, find_fix
from dualpipe_lab.pp.validation.rules import ProblemList, index_actions
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate
from dualpipe_lab.viz import bundle

RANKS, MICROBATCHES = range(1, 7), (1, 2, 3, 4, 6, 8, 12)
MODULES = [f"schedule-{name}" for name in ("check", "measures", "explain", "csv", "edits")] + ["studio-track", "path"]


def registry(ranks=RANKS, microbatches=MICROBATCHES):
    """Every schedule at every size that it has, without messages."""
    for name in schedules.names():
        for num_ranks in ranks:
            for num_microbatches in microbatches:
                try:
                    program = schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
                except ValueError:
                    continue  # a size that this schedule does not have
                yield strip(program)


READ = "const read = ({ name, rows, ...counts }) => makeProgram(name, parseProgram(rows, name).ranks, counts);"


def script():
    """The core's modules as one classic script, and what reads a `packed` program."""
    texts = {}
    for name in MODULES:
        bundle._collect(f"{name}.mjs", texts, ())
    return "".join(map(bundle._plain, texts.values())) + READ


def packed(program, **more):
    """A program as the page's tests read it."""
    counts = {"numStages": program.num_stages, "numMicrobatches": program.num_microbatches}
    return {"name": program.name, "rows": program.rows(), "numDirections": program.num_directions} | counts | more


def verdict(program, in_flight=None):
    """What the library says about a program, in the form of the page's `check`."""
    found = {"problems": [], "text": "", "order": None, "cycle": [], "fix": None}
    try:
        validate(program, in_flight=in_flight)
    except InvalidProgram as error:
        found |= {"problems": list(error.problems), "text": str(error)}
        if error.problems[0].startswith("deadlock"):
            found |= stuck(program)
    if program.feasible_order is not None:
        found["order"] = steps_in_order(program)
    return found


def stuck(program):
    run = UntimedRun(program, index_actions(program, ProblemList()))
    move, is_enough = find_fix(program, run)
    fix = [move.rank, move.position, str(move.step), move.target, move.words(program), is_enough]
    edges = [
        [edge.rank, edge.position, str(edge.action), edge.other, edge.other_position, str(edge.needed), edge.text]
        for edge in run.cycle()
    ]
    return {"cycle": edges, "fix": fix, "after": str(move.apply(program))}


def steps_in_order(program):
    """The steps in the order of the run without a clock, numbered rank by rank."""
    first, reached, found = [0], [0] * program.num_ranks, []
    for steps in program.ranks:
        first.append(first[-1] + len(steps))
    for rank, end in program.feasible_order:
        found += range(first[rank] + reached[rank], first[rank] + end)
        reached[rank] = end
    return found


def edited(rng, program):
    """The program after one to three edits of the kinds that a reader makes."""
    rows = [list(steps) for steps in program.ranks]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        filled = [row for row in rows if row]
        if filled:
            rng.choice(EDITS)(rng, rows, rng.choice(filled))
    return program.with_ranks(rows) if rng.random() < 0.8 else Program(program.name, rows)


def move(rng, rows, row):
    row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))


def swap(rng, rows, row):
    at = rng.randrange(len(row))
    other = min(at + rng.choice((1, 1, 2)), len(row) - 1)
    row[at], row[other] = row[other], row[at]


def delete(rng, rows, row):
    del row[rng.randrange(len(row))]


def delete_many(rng, rows, row):
    del row[rng.randrange(len(row)) :]


def duplicate(rng, rows, row):
    target = rng.choice(rows)
    target.insert(rng.randint(0, len(target)), rng.choice(row))


def misdirect(rng, rows, row):
    target = rng.choice(rows)
    target.insert(rng.randint(0, len(target)), row.pop(rng.randrange(len(row))))


def change(rng, rows, row):
    """Another kind, stage or microbatch, also one out of range."""
    at = rng.randrange(len(row))
    *others, action = actions_of(row[at])
    slip = rng.choice((0, 1, 2, 5, 17, 10**9, 999_999_999_999_999))
    field = rng.choice(("kind", "stage", "microbatch"))
    changed = action._replace(**{field: rng.choice("FBIW") if field == "kind" else slip})
    row[at : at + 1] = [*others, changed]


def move_stage(rng, rows, row):
    stage = actions_of(rng.choice(row))[0].stage
    moved = [step for step in row if any(action.stage == stage for action in actions_of(step))]
    row[:] = [step for step in row if step not in moved]
    rng.choice(rows).extend(moved)


def move_cell(rng, rows, row):
    """All work of one stage on one microbatch to another rank: the microbatch takes a route of its own."""
    stage, _, microbatch = actions_of(rng.choice(row))[0]
    moved = [step for step in row if isinstance(step, Action) and (step.stage, step.microbatch) == (stage, microbatch)]
    row[:] = [step for step in row if step not in moved]
    target = rng.choice(rows)
    places = sorted(rng.randint(0, len(target)) for _ in moved)
    for offset, (place, step) in enumerate(zip(places, moved, strict=True)):
        target.insert(place + offset, step)


def pair_up(rng, rows, row):
    """Pair a forward with a backward of its rank, mostly a near one; or take a pair apart."""
    pairs = [at for at, step in enumerate(row) if isinstance(step, Overlap)]
    if pairs and rng.random() < 0.3:
        at = rng.choice(pairs)
        row[at : at + 1] = row[at] if rng.random() < 0.5 else row[at][::-1]
        return
    forwards = [at for at, step in enumerate(row) if isinstance(step, Action) and step.kind == "F"]
    backwards = [at for at, step in enumerate(row) if isinstance(step, Action) and step.kind in "BI"]
    if forwards and backwards:
        at = rng.choice(forwards)
        other = min(rng.sample(backwards, min(3, len(backwards))), key=lambda back: abs(back - at))
        row[at] = Overlap(row[at], row[other])
        del row[other]


def split(rng, rows, row):
    at = rng.randrange(len(row))
    if isinstance(row[at], Action) and row[at].kind == "B":
        row[at : at + 1] = [row[at]._replace(kind="I"), row[at]._replace(kind="W")]


EDITS = (move, move, move, swap, swap, delete, delete_many, duplicate, misdirect, change, move_stage, pair_up, split)
EDITS += (move, swap, move, pair_up, move_cell)  # most edits leave the work complete, so that there are deadlocks


def broken(number, seed, ranks=range(1, 6), microbatches=(1, 2, 3, 4, 6, 8)):
    """Seeded edits of the registry's schedules."""
    rng, bases = random.Random(seed), list(registry(ranks, microbatches))
    return [edited(rng, rng.choice(bases)) for _ in range(number)]


def cells(program):
    """All actions of a program, sorted."""
    return sorted(chain.from_iterable(map(program.actions, range(program.num_ranks))))
