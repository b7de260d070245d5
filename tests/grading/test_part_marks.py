"""Parts of a trainer are marked alone, over the course's earlier parts, and the four runs as wholes."""

import json
from pathlib import Path

from dualpipe_course.grading import submissions
from dualpipe_course.grading.evaluator import evaluate
from dualpipe_course.grading.grader import Graded, Mark
from dualpipe_course.grading.report import parts_of
from dualpipe_course.own import finder
from dualpipe_lab.launch import payload

ROOT = Path(__file__).parents[2]
RING, DATA = (finder.official(part).replace("from .", "from mine.") for part in ("ring", "data"))


def found(folder, tmp_path):
    return submissions.find(folder, submissions.exercises(ROOT / "exercises"), tmp_path / "out")


def test_a_folder_of_parts_is_a_submission(tmp_path, book):
    maria, otto = tmp_path / "all" / "maria" / "my-course" / "mine", tmp_path / "all" / "otto"
    maria.mkdir(parents=True)
    (maria / "ring.py").write_text(f"{RING}\n# maria's\n")
    (maria / "__init__.py").write_text("")
    (maria / "old").mkdir()
    (maria / "old" / "data.py").write_text(DATA)
    (otto / "mine").mkdir(parents=True)
    (otto / "mine" / "ring.py").symlink_to(maria / "ring.py")
    (otto / "secret.ipynb").write_text("{}")
    made = {(one.learner, one.notebook): one for one in found(tmp_path / "all", tmp_path) if one.notebook}
    assert set(made) == {("maria", "ranks-and-messages"), ("maria", "runs")}
    (task,) = made["maria", "ranks-and-messages"].overlay.tasks
    assert task.answer == [f"{RING}\n# maria's\n"]
    tasks = made["maria", "runs"].overlay.tasks
    assert [task.name for task in tasks] == ["runs-1", "runs-2", "runs-3", "runs-4"]
    assert json.loads(tasks[0].answer[0]) == {"ring": f"{RING}\n# maria's\n"}


def test_a_notebook_wins_over_a_file_and_its_parts_run_too(tmp_path, book):
    maria = tmp_path / "all" / "maria"
    (maria / "mine").mkdir(parents=True)
    (maria / "mine" / "ring.py").write_text("no ring")
    notebook = json.loads((ROOT / "exercises" / "start" / "ranks-and-messages.ipynb").read_text())
    for cell in notebook["cells"]:
        if "answer-ranks-4" in cell["metadata"].get("tags", []):
            cell["source"] = RING
    (maria / "ranks.ipynb").write_text(json.dumps(notebook))
    made = {one.notebook: one for one in found(tmp_path / "all", tmp_path)}
    assert set(made) == {"ranks-and-messages", "runs"}
    assert json.loads(made["runs"].overlay.tasks[0].answer[0]) == {"ring": RING}


def judged(tmp_path, name, answer):
    folders = {"work": str(tmp_path), "home": str(tmp_path), "tmp": str(tmp_path)}
    task = {"name": name, "given": [], "answer": [answer], "check": "", "folders": folders}
    with payload.data_only():
        return evaluate(task)


def test_a_run_is_judged_by_all_parts_that_are_handed_in(tmp_path, monkeypatch):
    right = judged(tmp_path, "runs-3", json.dumps({"ring": RING}))
    assert (right["status"], right["message"]) == ("right", "equal to one process, by 1 of 8 parts of one's own")
    wrong = judged(tmp_path, "runs-3", json.dumps({"ring": RING.replace("step - 1", "step")}))
    assert wrong["status"] == "wrong"
    assert "is off by" in wrong["message"]
    cheat = judged(tmp_path, "runs-3", json.dumps({"ring": RING + "import torch.distributed\n"}))
    assert cheat["message"].startswith("mine.ring: line ")


def test_a_report_counts_parts_and_runs_by_learner():
    marks = [Mark("ranks-4", 4, 4, "right", "", 1), Mark("ranks-3", 2, 2, "right", "", 1)]
    runs = [Mark("runs-1", 3, 3, "right", "", 1), Mark("runs-2", 0, 3, "wrong", "", 1)]
    results = [Graded("maria", "ranks-and-messages", "", marks, []), Graded("maria", "runs", "", runs, [])]
    assert parts_of([*results, Graded("otto", "gpipe", "", marks[1:], [])]) == [
        "maria: parts 1 of 29, runs 1 of 4: dense"
    ]
