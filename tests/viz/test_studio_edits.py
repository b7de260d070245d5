"""The studio's edits: each does what its name says and nothing else, leaves the program before it alone, or refuses."""

import random

import pytest

from dualpipe_lab import Program, schedules
from dualpipe_lab.pp.validation.validator import validate

pytestmark = pytest.mark.browser

# Runs one edit per input, on a program that is frozen to its steps; returns the text after it, or the refusal.
RUN = """inputs => inputs.map(({ rows, name, edit, args, ...counts }) => {
  const program = makeProgram(name, stepsOf(rows), counts), before = programRows(program).join();
  program.ranks.forEach(row => { Object.freeze(row); row.forEach(Object.freeze); });
  Object.freeze(program.ranks);
  const edits = { insertStep, removeSteps, moveSteps, shiftSteps, replaceRow, moveStage, pairSteps,
    unpairStep, splitBackward, joinBackward };
  try {
    const after = edits[edit](program, ...args);
    const kept = new Set(program.ranks.flat());
    const rowsKept = after.ranks.filter(row => program.ranks.includes(row)).length;
    const fresh = after.ranks.flat().filter(step => !kept.has(step)).length;
    if (programRows(program).join() !== before) throw new Error("the program before the edit changed");
    return { rows: programRows(after), fresh, rowsKept, counts: [after.numStages, after.numMicrobatches] };
  } catch (error) { return error.message; }
})"""


@pytest.fixture
def core(modules):
    return modules("schedule-edits")


def packed(program, **more):
    counts = {"numStages": program.num_stages, "numMicrobatches": program.num_microbatches}
    return {"name": program.name, "rows": program.rows(), "numDirections": program.num_directions} | counts | more


def run(core, cases):
    return core.evaluate(RUN, [packed(program, edit=edit, args=args) for program, edit, args in cases])


def one(core, rows, edit, *args):
    (found,) = run(core, [(Program.parse("own", rows), edit, args)])
    return found


def place_in(rng, program):
    rank = rng.randrange(program.num_ranks)
    return [rank, rng.randrange(len(program.ranks[rank]))]


def programs(number, seed):
    rng = random.Random(seed)
    names = schedules.names(synchronous=True)
    return rng, [schedules.build(rng.choice(names), *rng.choice([(2, 4), (2, 6), (4, 8)])) for _ in range(number)]


def test_moves_insertions_and_removals_are_those_of_lists(core):
    rng, bases = programs(200, seed=1)
    cases, expected = [], []
    for program in bases:
        rows = [list(map(str, row)) for row in program.ranks]
        (rank, position), (to, _) = place_in(rng, program), place_in(rng, program)
        at = rng.randint(0, len(rows[to]))
        cases.append((program, "moveSteps", [[[rank, position]], to, at]))
        moved = [list(row) for row in rows]
        moved[to].insert(at, "here")
        step = moved[rank].pop(position + (to == rank and at <= position))
        moved[to][moved[to].index("here")] = step
        expected.append((moved, 0))
        cases.append((program, "removeSteps", [[[rank, position]]]))
        expected.append(
            ([[s for i, s in enumerate(row) if (r, i) != (rank, position)] for r, row in enumerate(rows)], 0)
        )
        new = {"stage": 0, "kind": "W", "microbatch": 1}
        cases.append((program, "insertStep", [to, at, new]))
        expected.append(([[*row[:at], "0W1", *row[at:]] if r == to else row for r, row in enumerate(rows)], 1))
    for (program, edit, args), found, (rows, fresh) in zip(cases, run(core, cases), expected, strict=True):
        assert found["rows"] == [" ".join(row) for row in rows], (program, edit, args)
        assert found["fresh"] == fresh  # all other steps are the same objects
        assert found["counts"] == [program.num_stages, program.num_microbatches]
        assert found["rowsKept"] >= program.num_ranks - 2  # and all other rows the same arrays


def test_a_stage_that_moves_takes_all_its_work_along_and_the_schedule_still_runs(core):
    rng, bases = programs(400, seed=2)
    cases = [(p, "moveStage", [rng.randrange(p.num_stages), rng.randrange(p.num_ranks)]) for p in bases]
    moved = 0
    for (program, _, (stage, rank)), found in zip(cases, run(core, cases), strict=True):
        homes = {r for r in range(program.num_ranks) for action in program.actions(r) if action.stage == stage}
        if homes == {rank}:
            assert found == f"all work of stage {stage} is on rank {rank} already"
            continue
        moved += 1
        after = program.with_ranks(Program.parse("after", found["rows"]).ranks)
        assert sorted(after) == sorted(program)
        assert all((a.stage == stage) <= (r == rank) for r in range(after.num_ranks) for a in after.actions(r))
        if all(after.ranks):  # no rank is left without work
            validate(after)
    assert moved > 150


def test_several_steps_move_together_and_stop_at_the_ends(core):
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert one(core, rows, "moveSteps", [[0, 0], [0, 2]], 0, 4)["rows"][0] == "0F1 0B1 0F0 0B0"
    assert one(core, rows, "moveSteps", [[0, 0], [1, 1]], 1, 2)["rows"] == ["0F1 0B0 0B1", "1F0 0F0 1B0 1F1 1B1"]
    assert one(core, rows, "shiftSteps", [[0, 1], [0, 2]], 0, 1)["rows"][0] == "0F0 0B1 0F1 0B0"
    assert one(core, rows, "shiftSteps", [[0, 2], [0, 3]], 0, 1)["rows"] == rows
    assert one(core, rows, "shiftSteps", [[0, 0], [0, 2]], 0, -1)["rows"][0] == "0F0 0B0 0F1 0B1"
    assert one(core, rows, "shiftSteps", [[0, 1], [1, 3]], 1, 0)["rows"] == ["0F0 0B0 0B1", "1F0 0F1 1B0 1F1 1B1"]
    assert one(core, rows, "shiftSteps", [[0, 1], [1, 1]], -1, 0)["rows"] == ["0F0 1B0 0F1 0B0 0B1", "1F0 1F1 1B1"]


REFUSED = [
    ("removeSteps", [[[2, 0]]], "there is no rank 2; the schedule has ranks 0 to 1"),
    ("moveSteps", [[[0, 0]], 1, 9], "there is no position 9 on rank 1; give 0 to 4"),
    ("replaceRow", [1, "1F0 what"], "'what' is not an action; write stage, kind and microbatch, such as 1F2"),
    ("replaceRow", [1, "(1B0;1F1)"], "'(1B0;1F1)' is not an action"),
    ("moveStage", [7, 0], "no rank runs stage 7; the schedule has stages 0 to 1"),
    ("pairSteps", [[[1, 0], [1, 2]]], "a pair takes an F and a B or I, not 1F0 and 1F1"),
    ("pairSteps", [[[0, 0], [1, 1]]], "a pair runs on one rank, 0F0 and 1B0 are on ranks 0 and 1"),
    ("pairSteps", [[[1, 0], [1, 1]]], "1B0 needs the result of 1F0, they cannot be a pair"),
    ("unpairStep", [1, 0], "1F0 is not a pair, so there is nothing to take apart"),
    ("splitBackward", [0, 2], "0I1 has no B, so there is nothing to split"),
    ("joinBackward", [[[0, 2]]], "rank 0 has 0I1, but no 0W1 to join it to"),
]


def test_what_makes_no_sense_is_refused_with_a_sentence(core):
    program = Program.parse("own", ["0F0 (0F1;0B0)OVERLAP_F_B 0I1", "1F0 1B0 1F1 1B1"])
    found = run(core, [(program, edit, args) for edit, args, _ in REFUSED])
    for said, (edit, args, words) in zip(found, REFUSED, strict=True):
        assert str(said).startswith(words), (edit, args)
