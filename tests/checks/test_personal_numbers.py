"""Numbers of a learner's own: every variant has whole answers, its own are right and a neighbour's are wrong."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from dualpipe_course import progress_page, record
from dualpipe_course.exercise import hint_of
from dualpipe_course.grading.evaluator import arguments_of, seed_in
from dualpipe_course.in_page import judge
from dualpipe_course.personal import personal, seed_of, with_seed
from dualpipe_course.registry import TOPICS, all_checks, find
from dualpipe_course.variants import Variants
from dualpipe_lab.pp import Cost, simulate
from dualpipe_lab.pp.schedules import easy_dualpipe, interleaved, v_min, zbv

ROOT = Path(__file__).parents[2]
SEEDS = range(1, 21)
NAMES = [check.name for check in all_checks() if check.variants]
PARTS = {part: [name for name in NAMES if TOPICS[name[:-2]].startswith(f"{part}.")] for part in progress_page.PARTS}
SCHEDULES = (
    "easy_dualpipe-1", "interleaved-1", "v_shapes-1",
)  # fmt: skip
PREDICT = [check.name for check in all_checks() if check.about.kind == "predict"]
FIXED = {  # numbers that are words or formulas of the text, a table, or a program
    "io-1", "ring_all_reduce-1", "time-1",
}  # fmt: skip
NUMBER = re.compile(r"\d[\d.,]*\d|\d")


def notebook_of(name):
    for path in (ROOT / "exercises").glob("*/*.ipynb"):
        text = path.read_text(encoding="utf-8")
        if f'"check-{name}"' in text:
            return json.loads(text)
    raise LookupError(name)


def text_of(notebook):
    return "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def test_the_exercises_that_ask_for_numbers_have_variants_or_a_reason():
    assert set(PREDICT) - set(NAMES) == FIXED
    assert set(NAMES) <= set(PREDICT)


@pytest.mark.parametrize("part", PARTS)
def test_every_seed_has_numbers_and_answers_of_its_own(part):
    for check in map(find, PARTS[part]):
        numbers_and_answers_of(check)


def numbers_and_answers_of(check):
    assert len(check.variants.all) >= len(SEEDS)
    assert check.verdict(check.variants.answers(None)).passed  # the closed form is the book's
    of_seed = {seed: check.variants.answers(seed) for seed in SEEDS}
    for seed, answers in of_seed.items():
        assert check.verdict(tuple(answers), seed=seed).passed
        assert check.verdict(answers, seed=seed).message
    for one, other in combinations([None, *SEEDS], 2):
        assert check.variants.numbers(one) != check.variants.numbers(other)
        if other is not None:
            assert not check.verdict(of_seed.get(one, check.variants.answers(None)), seed=other).passed
    for place, (own, of_book) in enumerate(zip(answers, check.variants.answers(None), strict=True)):
        wrong = check.verdict([*answers[:place], 10**15 + 1, *answers[place + 1 :]], seed=seed).message
        if own != of_book:
            assert f", it is {of_book:,}; does your way lead there?" in wrong
        else:
            assert re.search(r": this one [a-z ]+; check\.\w+\.hint\(1\) has a hint$", wrong)


@pytest.mark.parametrize("part", PARTS)
def test_a_slip_gets_its_sentence_whatever_the_numbers(part):
    for check in map(find, PARTS[part]):
        assert not check.about.trail or any(check.slips)
        for seed in SEEDS:
            slips_of(check, seed)


def slips_of(check, seed):
    right = check.variants.answers(seed)
    for place, known in enumerate(check.variants.slips(seed)):
        for value, sentence in known.items():
            verdict = check.verdict([*right[:place], value, *right[place + 1 :]], seed=seed)
            assert not verdict.passed
            assert verdict.message.endswith(f": {sentence}"), (verdict, value)


def test_a_number_that_two_mistakes_lead_to_or_that_is_right_tells_nothing():
    known = ((2, "b is left out"), (4, "b counts"), (4, "twice a"), (6, "right"), (1.5, "half of b"), (3.0, "b alone"))
    variants = Variants(("sum",), lambda a, b: (a + b,), a=(2, 5), b=(4, 3), slips=lambda a, b: (known,))
    assert variants.slips() == [{2: "b is left out", 1.5: "half of b", 3: "b alone"}]


@pytest.mark.parametrize("part", PARTS)
def test_the_page_s_text_gets_the_numbers_and_nothing_else_changes(part):
    for name in PARTS[part]:
        numbers_in(text_of(notebook_of(name)), find(name).variants)


def numbers_in(pristine, variants):
    assert [pristine.count(sentence) for sentence in variants.sentences(None)] == [1] * len(variants.sentences(None))
    for seed in SEEDS:
        text = variants.text(pristine, seed)
        assert [text.count(sentence) for sentence in variants.sentences(seed)] == [1] * len(variants.sentences(seed))
        assert NUMBER.sub("#", text) == NUMBER.sub("#", pristine)  # as exercise.js puts them in, number by number


def simulated(name, p=4, m=6, f=1, b=1, **of):
    """What the simulator says to a variant of an exercise about a schedule, None where it is not asked."""
    if name == "interleaved-1":
        long, short = (simulate(interleaved(4, num, 3), Cost(F=f, B=b)) for num in (m, 2))
        return [long.makespan, None, None, short.makespan]
    if name == "easy_dualpipe-1":
        timeline = simulate(easy_dualpipe(p, m), Cost(F=f, B=b))
        peaks = [timeline.peak_activations(rank) for rank in (0, 2)]
        return [timeline.bubble_time(0), timeline.makespan, *peaks]
    assert name == "v_shapes-1"
    one, other = (simulate(build(p, 30), Cost(F=1, I=1, W=1)) for build in (zbv, v_min))
    ends = [simulate(v_min(p, num), Cost(F=f, I=of["i"], W=1)).makespan for num in (60, 61)]
    found = [(max(map(line.peak_activations, range(p))), line.bubble_time(0)) for line in (one, other)]
    return [*found[0], *found[1], ends[1] - ends[0]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_closed_forms_of_schedules_are_what_the_simulator_finds(name):
    variants = find(name).variants
    for seed in SEEDS:
        found = simulated(name, **variants.numbers(seed))
        for value, right in zip(found, variants.answers(seed), strict=True):
            assert value in (None, right), (variants.numbers(seed), found, variants.answers(seed))


def test_a_notebook_carries_its_seed():
    notebook = notebook_of("interleaved-1")
    assert seed_of(notebook) is None
    personal(notebook, 4711)
    assert seed_of(json.loads(json.dumps(notebook))) == 4711
    checks = ["".join(cell["source"]) for cell in notebook["cells"] if "check-interleaved-1" in str(cell["metadata"])]
    assert checks == ["check.interleaved.numbers((makespan, peak, messages, makespan_of_two), seed=4711)"]
    assert (len(arguments_of(checks[0])), seed_in(checks[0])) == (1, 4711)
    assert seed_in("check.interleaved.numbers((makespan, peak, messages, makespan_of_two))") is None
    for nonsense in (0, -1, record.MAX_SEED + 1, "4", True, 1.5, None, [1]):
        assert seed_of({"metadata": {"dualpipe_lab": {"seed": nonsense}}}) is None
    untouched = notebook_of("studio-1")
    personal(untouched, 4711)
    assert untouched == notebook_of("studio-1")


def test_a_page_judges_by_the_seed_of_its_reader():
    answers = find("interleaved-1").variants.answers(4711)
    cell = "from dualpipe_course import check"
    call = "check.interleaved.numbers((makespan, peak, messages, makespan_of_two), seed=4711)"
    names = "makespan, peak, messages, makespan_of_two"
    assert "solved" in judge([cell], f"{names} = {answers}", call)
    assert "it is 234; does your way lead there?" in judge([cell], f"{names} = 235, 5, 264, 78", call)
    assert "that is right with the book's numbers, " in judge([cell], f"{names} = 234, 5, 264, 78", call)


def test_a_call_on_several_lines_gets_its_seed():
    assert eval(with_seed("dict(\n    zip(\n        'ab', (1, 2)\n    ),\n)\n", 7)) == {"a": 1, "b": 2, "seed": 7}


def test_a_hint_says_which_numbers_it_is_about(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hint_of([find("interleaved-1")], 1)
    (tmp_path / record.FOLDER / record.COPIES).write_text("{}")
    (tmp_path / record.FOLDER / record.SEED).write_text("4711\n")
    hint_of([find("interleaved-1")], 1)
    assert "book's numbers" not in (ROOT / "book/_assets/dp/exercise.js").read_text()  # it gets the sentence from here
    first, second = capsys.readouterr().out.splitlines()
    assert "book's numbers" not in first
    assert "with the book's numbers, microbatches 12, F 2, B 4: " in second
