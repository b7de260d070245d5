"""Personal numbers of submissions: judged by the seed that a notebook carries; two learners with one seed are noted."""

import json
from pathlib import Path

import nbformat

from dualpipe_course.grading import submissions
from dualpipe_course.grading.evaluator import arguments_of, seed_in
from dualpipe_course.personal import personal
from dualpipe_course.registry import find

ROOT = Path(__file__).parents[2]


def hand_in(folder, learner, seed, answer):
    notebook = json.loads((ROOT / "exercises" / "pp" / "interleaved.ipynb").read_bytes())
    if seed:
        personal(notebook, seed)
    for cell in notebook["cells"]:
        if "answer-interleaved-1" in cell["metadata"].get("tags", ()):
            cell["source"] = f"makespan, peak, messages, makespan_of_two = {answer}"
    path = folder / learner / "interleaved.ipynb"
    path.parent.mkdir(parents=True)
    nbformat.write(nbformat.from_dict(notebook), path)


def test_a_submission_is_judged_by_the_numbers_of_its_seed(tmp_path):
    answers = {"anna": (17, find("interleaved-1").variants.answers(17)), "book": (None, [234, 5, 264, 78])}
    answers |= {"neighbour": (18, answers["anna"][1]), "twin": (17, answers["anna"][1])}
    for learner, (seed, answer) in answers.items():
        hand_in(tmp_path / "in", learner, seed, answer)
    pristine = submissions.exercises(ROOT / "exercises")
    found = {one.learner: one for one in submissions.find(tmp_path / "in", pristine, tmp_path / "out")}
    assert {learner: one.seed for learner, one in found.items()} == {
        learner: seed for learner, (seed, _) in answers.items()
    }
    assert {learner: one.overlay.notes for learner, one in found.items()} == {
        "anna": ["the same seed of personal numbers, 17, as twin"],
        "book": ["no seed of personal numbers: judged by the book's, whose answers are published"],
        "neighbour": [],
        "twin": ["the same seed of personal numbers, 17, as anna"],
    }
    statuses = {}
    for learner, one in found.items():
        task = next(task for task in one.overlay.tasks if task.name == "interleaved-1")
        assert len(arguments_of(task.check)) == 1
        assert seed_in(task.check) == one.seed
        verdict = find("interleaved-1").verdict(answers[learner][1], seed=seed_in(task.check))
        statuses[learner] = verdict.passed
    assert statuses == {"anna": True, "book": True, "neighbour": False, "twin": True}
