"""The studio's verdicts equal the library's: texts, circles, fixes and orders of thousands of programs, in Chromium."""

import random
from collections import Counter

import pytest
from schedule_vectors import broken, packed, registry, steps_in_order, verdict

from dualpipe_lab import Cost, Program, schedules, simulate
from dualpipe_lab.pp.program import Action, Overlap
from dualpipe_lab.pp.validation.validator import validate

pytestmark = pytest.mark.browser

CHECK = """programs => programs.map(packed => {
  const program = read(packed), { problems, text, order, cycle, fix, marks } = check(program, packed);
  if (marks.length !== problems.length) throw new Error("marks and problems differ in number");
  const found = { problems, text, order: order && [...order], fix: null };
  found.cycle = cycle.map(e =>
    [e.rank, e.position, stepText(e.action), e.other, e.otherPosition, stepText(e.needed), e.text]);
  if (!fix) return found;
  found.fix = [fix.rank, fix.position, stepText(fix.step), fix.target, fix.words, fix.isEnough];
  return { ...found, after: programText(applyMove(program, fix)) };
})"""


def bounds_of(rng, program):
    """No bound, one for all ranks, or one each."""
    one = rng.choice((1, 2, 3, program.num_microbatches))
    return rng.choice((None, one, [one + rank % 2 for rank in range(program.num_ranks)]))


def compare(core, programs, seed):
    rng, inputs, expected = random.Random(seed), [], []
    for program in programs:
        bound = bounds_of(rng, program)
        inputs.append(packed(program, inFlight=bound))
        expected.append(verdict(program, bound))
    for program, found, wanted in zip(programs, core.evaluate(CHECK, inputs), expected, strict=True):
        assert found == wanted, program
    return expected


def test_every_schedule_of_the_registry_has_the_library_s_verdict(core):
    programs = list(registry())
    expected = compare(core, programs, seed=1)
    assert len(programs) > 500
    assert 50 < sum(bool(one["problems"]) for one in expected) < len(programs) / 2  # by their bounds of memory


def test_thousands_of_edits_have_the_library_s_verdict(core):
    expected = compare(core, broken(2400, seed=2), seed=3)
    kinds = Counter(one["problems"][0].split(":")[0] if one["problems"] else "valid" for one in expected)
    fixes = Counter(one["fix"][-1] for one in expected if one["fix"])
    assert kinds["valid"] > 200
    assert kinds["deadlock"] > 200
    assert fixes[False] > 5
    assert sum(" more" in one["text"].splitlines()[-1] for one in expected if one["text"]) > 3
    assert sum("num_directions" in one["text"] for one in expected) > 5


def as_object(step):
    if isinstance(step, Overlap):
        return {"forward": step.forward._asdict(), "backward": step.backward._asdict()}
    return step._asdict()


STRANGE = [
    [],
    [[], [Action(0, "F", 0), Action(0, "B", 0)]],
    [[Action(0, "X", 0), Action(0, "F", 0), Action(0, "B", 0)]],
    [[Action(-1, "F", 0), Action(0, "F", -2), Action(0, "B", 0)]],
    [[Overlap(Action(0, "B", 0), Action(0, "F", 0))]],
    [[Overlap(Action(0, "F", 0), Action(0, "W", 0)), Action(0, "I", 0)]],
    [[Action(0, "F", 0), Overlap(Action(0, "F", 1), Action(0, "B", 0)), Overlap(Action(0, "F", 1), Action(0, "B", 1))]],
    [[Action(0, "F", 0), Overlap(Action(0, "F", 1), Action(0, "B", 1)), Action(0, "B", 0)]],
]


def test_steps_that_no_text_can_say_have_the_library_s_verdict(core):
    judge = """all => all.map(ranks => { const { problems, text } = check(makeProgram("it's", ranks));
      return [problems, text]; })"""
    found = core.evaluate(judge, [[list(map(as_object, row)) for row in ranks] for ranks in STRANGE])
    for ranks, one in zip(STRANGE, found, strict=True):
        expected = verdict(Program("it's", ranks))
        assert one == [expected["problems"], expected["text"]], ranks


def test_the_places_of_a_problem_are_those_that_its_text_names(core):
    rows = ["0F0 0F1 0B1 0B0 0F1", "1F0 1B0 1B1 1F1"]
    problems, marks = core.evaluate(
        "rows => { const v = check(parseProgram(rows)); return [v.problems, v.marks]; }", rows
    )
    places = [[f"rank {p['rank']}, position {p['position']}" for p in found] for found in marks]
    assert problems[0] == "rank 0, position 4: 0F1 runs again, it ran at rank 0, position 1; keep one"
    assert all(place in problems[0] for place in places[0])
    assert problems[1].startswith("rank 1: 1B1 (position 2) comes before 1F1 (position 3)")
    assert places[1] == ["rank 1, position 3", "rank 1, position 2"]


def test_a_bound_for_another_number_of_ranks_is_refused(core):
    said = core.evaluate(
        "rows => { try { check(parseProgram(rows), { inFlight: [1, 2] }); } catch ({ message }) { return message; } }",
        ["0F0 0B0"],
    )
    with pytest.raises(ValueError, match="in_flight lists 2 bounds") as refusal:
        validate(Program.parse("schedule", "0F0 0B0"), in_flight=[1, 2])
    assert said == str(refusal.value)


def test_a_large_schedule_has_the_library_s_order_and_times(core):
    program = schedules.build("1f1b", 64, 512)
    order, ends, took = core.evaluate(
        """text => { const start = performance.now(), program = parseProgram(text), { order } = check(program);
        const { times } = measures(program, { F: 2, I: 1, W: 3, B: null, overlap: null, latency: 1, transfer: 2 });
        return [[...order], [...times.end], performance.now() - start]; }""",
        str(program),
    )
    timeline = simulate(program, Cost(F=2, I=1, W=3, latency=1, transfer=2))
    assert order == steps_in_order(program)
    assert ends == [span.end for row in timeline.spans_by_rank for span in row]
    assert took < 10_000  # on a loaded machine; about 35 ms of processor time
