"""Grafted notebooks: `pytest --nbval` of them is the mark, whatever else a submission holds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import yaml

from dualpipe_course.commands import graft
from dualpipe_course.grading.marks import pytest_runtest_setup
from dualpipe_course.personal import personal
from dualpipe_course.registry import find

ROOT = Path(__file__).parents[2]
EXERCISE, SOLUTION = ROOT / "exercises/ep/eplb.ipynb", ROOT / "solutions/ep/eplb/eplb.ipynb"
WORKFLOW = yaml.safe_load((ROOT / "examples/classroom/marks.yml").read_text(encoding="utf-8"))
NUMBERS = "replicas, heaviest, moved_mib, summed_mib = "
RIGHT = {
    tag: "".join(cell["source"])
    for cell in json.loads(SOLUTION.read_bytes())["cells"]
    for tag in cell["metadata"].get("tags", ())
}
TALKS = RIGHT["answer-eplb-2"].replace('"""\n', '"""\n    print("called")\n', 1) + "\nprint('defined')"
ONE_WRONG = f"# NBVAL_RAISES_EXCEPTION\n{NUMBERS}2, 13, 9, 6"
NOTHING = {"answer-eplb-2": ""}  # a name that is not defined: quickly judged


def hand_in(folder, learner, answers, seed=None, edited=None):
    """Write a submission: the exercise with answers, and with edited tags and checks."""
    notebook = json.loads(EXERCISE.read_bytes())
    if seed:
        personal(notebook, seed)
    for cell in notebook["cells"]:
        for tag in tuple(cell["metadata"].get("tags", ())):
            cell["source"] = answers.get(tag, cell["source"])
            if edited and tag.startswith(("answer-", "check-")):
                cell["metadata"]["tags"] += edited
    path = folder / learner / "eplb.ipynb"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")


def seeded(seed):
    return NUMBERS + str(find("eplb-1").variants.answers(seed))


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A folder of submissions, grafted and marked by the commands of the workflow for a classroom."""
    folder = tmp_path_factory.mktemp("graft")
    submitted, path = folder / "submissions", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    forged = {"check-eplb-1": "print('eplb-1 solved: yes')", "answer-eplb-1": ONE_WRONG}
    hand_in(submitted, "right", RIGHT | {"answer-eplb-2": TALKS})
    hand_in(submitted, "partly", {"answer-eplb-1": ONE_WRONG, "answer-eplb-2": RIGHT["answer-eplb-2"]})
    hand_in(submitted, "own numbers", NOTHING | {"answer-eplb-1": seeded(17)}, seed=17)
    hand_in(submitted, "neighbour", {"answer-eplb-1": seeded(17)}, seed=18)
    hand_in(submitted, "edited", NOTHING | forged, edited=["raises-exception", "nbval-skip", "nbval-ignore-output"])
    (submitted / "broken.ipynb").write_text("{", encoding="utf-8")
    (folder / "course").symlink_to(ROOT)
    install, *steps = [step["run"] for step in WORKFLOW["jobs"]["marks"]["steps"] if "run" in step]
    assert ".venv/.installed" in install
    for step in steps:
        run = subprocess.run(
            ["bash", "-c", step],
            cwd=folder,
            env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert run.returncode == 1, run.stdout + run.stderr
    report = ElementTree.parse(folder / "junit.xml")
    return SimpleNamespace(out=folder / "grafted", printed=run.stdout, cases=list(report.iter("testcase")))


def properties(case):
    return {one.get("name"): one.get("value") for one in case.iter("property")}


def failed(marked, learner):
    """The checks of a learner that failed, each with its message."""
    cases = [case for case in marked.cases if properties(case).get("learner") == learner]
    assert len(cases) == 2
    return {
        properties(case)["exercise"]: case.find("failure").text for case in cases if case.find("failure") is not None
    }


def test_right_answers_pass_whatever_they_print(marked):
    assert failed(marked, "right") == {}


def test_wrong_and_empty_answers_fail_alone_each_with_its_sentence(marked):
    found = failed(marked, "partly")
    assert list(found) == ["eplb-1"]
    assert "the heavier one" in found["eplb-1"]
    assert "eplb-2: not written yet" in failed(marked, "neighbour")["eplb-2"]


def test_personal_numbers_are_marked_by_the_seed_of_the_notebook(marked):
    assert list(failed(marked, "own numbers")) == ["eplb-2"]
    assert list(failed(marked, "neighbour")) == ["eplb-1", "eplb-2"]
    cells = json.loads((marked.out / "own-numbers-eplb.ipynb").read_bytes())["cells"]
    (check,) = [cell for cell in cells if "check-eplb-1" in cell["metadata"].get("tags", ())]
    line = find("eplb-1").verdict(find("eplb-1").variants.answers(17), seed=17).message
    assert check["outputs"][0]["text"] == f"eplb-1 solved: {line}\n"


def test_edited_checks_tags_and_comments_gain_nothing(marked):
    assert list(failed(marked, "edited")) == ["eplb-1", "eplb-2"]
    grafted = (marked.out / "edited-eplb.ipynb").read_text(encoding="utf-8")
    assert not any(word in grafted for word in ("raises-exception", "nbval-skip", "NBVAL", "eplb-1 solved: yes"))


def test_a_submission_that_cannot_be_read_fails_with_the_reason(marked):
    reasons = [case.find("failure").text for case in marked.cases if case.get("classname") == "grafted.broken.ipynb"]
    assert len(reasons) == 1
    assert "no notebook of format 4" in reasons[0]


def test_only_checks_and_what_cannot_be_read_fail(marked):
    others = [case for case in marked.cases if case.find("failure") is not None and not properties(case)]
    assert [case.get("classname") for case in others] == ["grafted.broken.ipynb"]


def test_points_are_printed_at_the_end(marked):
    lines = marked.printed.splitlines()
    assert "partly  eplb  1✗ 2✓  3 / 4" in lines
    assert "right  eplb  1✓ 2✓  4 / 4" in lines


def test_after_a_cell_that_took_too_long_the_rest_is_judged():
    """nbval alone expects the rest to fail, and a run without another failure passes."""
    item = SimpleNamespace(parent=SimpleNamespace(timed_out=True))
    pytest_runtest_setup(item)
    assert not item.parent.timed_out


def test_grafting_again_leaves_nothing_of_before_and_spares_a_folder_of_others(tmp_path, capsys):
    hand_in(tmp_path / "in", "anna", {})
    graft(tmp_path / "in", tmp_path / "out")
    assert capsys.readouterr().out == f"==> 1 notebooks; mark them: pytest --nbval {tmp_path / 'out'}\n"
    (tmp_path / "in" / "anna").rename(tmp_path / "in" / "zoe")
    graft(tmp_path / "in", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["conftest.py", "zoe-eplb.ipynb"]
    hand_in(tmp_path / "in", "anna", {})
    with pytest.raises(ValueError, match="notebooks that graft has not written"):
        graft(tmp_path / "in", tmp_path / "in" / "zoe")
    with pytest.raises(ValueError, match="needs a checkout of the course"):
        graft(tmp_path / "in", tmp_path / "out", tmp_path)
