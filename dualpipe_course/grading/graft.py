"""Graft: a learner's answers in the notebook that the course gives out, so that `pytest --nbval` is the mark.

In: a folder of submissions, a checkout of the course.  Out: a folder with one notebook per submission and a
`conftest.py`.  Check cells have the outputs that the solution stores, for the learner's own numbers where there are
some; all other cells count as never run, and nbval compares nothing that such a cell shows.
Only the text of answer cells comes from the learner.  The notebooks run without a sandbox.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualpipe_course import registry
from dualpipe_course.grading.notebook import Task
from dualpipe_course.grading.report import plain
from dualpipe_course.grading.submissions import Submission, exercises, find
from dualpipe_course.personal import personal

Notebook = dict[str, Any]
CONFTEST = '''\
"""What `pytest --nbval` does in this folder, which `dualpipe-lab graft` has written, and writes anew."""

from dualpipe_course.grading.marks import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_setup,
    pytest_terminal_summary,
)
'''


@dataclass(frozen=True)
class Page:
    """An exercise as the course gives it out, and its solution with outputs."""

    exercise: Notebook
    solution: Notebook


def graft(folder: Path, out: Path, course: Path) -> list[str]:
    """Write a notebook for each submission below a folder; return a line for each that cannot be read.

    Raises:
        ValueError: there is no submission, no checkout of the course, or `out` holds something else.
    """
    if not (course / "solutions").is_dir():
        raise ValueError(f"no solutions in {course}: graft needs a checkout of the course, name one by --course")
    submitted = find(folder, exercises(course / "exercises"), out)
    _empty(out)
    names = _names(submitted)
    for submission in submitted:
        page = _page(course, submission.notebook) if submission.notebook else None
        text = json.dumps(grafted(page, submission), indent=1)
        (out / f"{names[submission.key]}.ipynb").write_text(text + "\n", encoding="utf-8")
    return [f"{plain(str(one.path))}: {plain(one.problem)}" for one in submitted if one.problem]


def grafted(page: Page | None, submission: Submission) -> Notebook:
    """Return the exercise with the answers of a submission; one that cannot be read begins with a cell that fails."""
    notebook: Notebook = (
        deepcopy(page.exercise) if page else {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    )
    if submission.seed is not None:
        personal(notebook, submission.seed)
    shown = {tag: cell["outputs"] for cell in page.solution["cells"] for tag in _tags(cell)} if page else {}
    tasks = {f"answer-{task.name}": task for task in submission.overlay.tasks}
    cells = [_code("problem", f"raise ValueError({plain(submission.problem)!r})")] if submission.problem else []
    for cell in notebook["cells"]:
        tag = next((tag for tag in _tags(cell) if tag.startswith(("answer-", "check-"))), "")
        if tag.startswith("answer-"):
            cells += _answer(cell, tasks[tag])
            continue
        if tag.startswith("check-"):
            outputs = _solved(tag.removeprefix("check-"), submission.seed) or shown[tag]
            cell |= {"outputs": outputs, "execution_count": 1}  # nbval compares no cell without a count
        cells.append(cell)
    notebook["cells"] = cells
    notebook["metadata"].setdefault("dualpipe_lab", {})["learner"] = plain(submission.learner)
    return notebook


def _answer(cell: dict[str, Any], task: Task) -> list[dict[str, Any]]:
    """The learner's cells in place of the starter, which stays where there are none."""
    parts = task.answer or [task.starter]
    return [_code(f"{cell['id']}-{number}", _harmless(part), _tags(cell)) for number, part in enumerate(parts)]


def _harmless(source: str) -> str:
    """The text of a cell without comments that nbval obeys, and in letters that can be sent to a kernel."""
    return source.replace("NBVAL_", "nbval_").encode("utf-8", "replace").decode()


def _solved(name: str, seed: int | None) -> list[dict[str, Any]]:
    """What a check shows for right answers to a learner's own numbers; nothing if there are none."""
    check = registry.find(name)
    if seed is None or check is None or check.variants is None:
        return []
    line = check.verdict(check.variants.answers(seed), seed=seed).message
    return [{"output_type": "stream", "name": "stdout", "text": f"{name} solved: {line}\n"}]


def _code(name: str, source: str, tags: list[str] | None = None) -> dict[str, Any]:
    metadata = {"tags": tags} if tags else {}
    cell = {"cell_type": "code", "id": name, "metadata": metadata, "source": source}
    return cell | {"execution_count": None, "outputs": []}


def _tags(cell: dict[str, Any]) -> list[str]:
    return list(cell["metadata"].get("tags", []))


def _page(course: Path, name: str) -> Page:
    (exercise,) = (course / "exercises").rglob(f"{name}.ipynb")
    part = exercise.relative_to(course / "exercises").parent
    solution = course / "solutions" / part / name / f"{name}.ipynb"
    return Page(*(json.loads(path.read_bytes()) for path in (exercise, solution)))


def _names(submitted: list[Submission]) -> dict[str, str]:
    """A name for each notebook: the path of the submission, with what makes it unique where two would be the same."""
    readable = {one.key: one.key.rpartition("-")[0] for one in submitted}
    lower = [name.lower() for name in readable.values()]
    return {key: name if lower.count(name.lower()) == 1 else key for key, name in readable.items()}


def _empty(out: Path) -> None:
    """Remove what graft has written into a folder, and make one where there is none."""
    conftest = out / "conftest.py"
    earlier = list(out.glob("*.ipynb"))
    if earlier and not (conftest.is_file() and conftest.read_text(encoding="utf-8") == CONFTEST):
        raise ValueError(f"{out} holds notebooks that graft has not written: name an empty folder by --out")
    for path in earlier:
        path.unlink()
    out.mkdir(parents=True, exist_ok=True)
    conftest.write_text(CONFTEST, encoding="utf-8")
