"""The studio's verdicts equal the library's: texts, circles, fixes and orders of thousands of programs, in Chromium."""

import random
from collections import Counter

import pytest
from schedule_vectors import broken, packed, registry, script, verdict

pytestmark = pytest.mark.browser

READ = """const read = ({ name, rows, ...counts }) => makeProgram(name, parseProgram(rows, name).ranks, counts);"""
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


@pytest.fixture
def core(page):
    page.show(f"<script>{script()}{READ}</script>")
    return page


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
