"""Finding submissions, and the exercise that each one answers.

`folder/maria/gpipe.ipynb` is Maria's; in a flat folder `maria-gpipe.ipynb` belongs to "maria-gpipe".  The exercise is
told by the answer tags, and where there are none by the file's name.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dualpipe_lab.grading.notebook import Cell, Paper, Unreadable, overlay, parse, read, read_bytes, topic_tags

LIBRARY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Submission:
    """One submitted notebook.

    Attributes:
        learner, notebook: whose it is, and the exercise notebook it answers ("" if that cannot be told).
        key: names it in the folder of results; no two paths have the same.
        digest: changes with the submission, the exercise and the checks.
        paper: what there is to judge.
        problem: why there is nothing to judge, or an empty string.
    """

    learner: str
    notebook: str
    key: str
    digest: str
    paper: Paper
    problem: str = ""


def exercises(folder: Path) -> dict[str, list[Cell]]:
    """The pristine notebooks by name.

    Raises:
        ValueError: there are none.
    """
    paths = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not paths:
        raise ValueError(f"no exercise notebook in {folder}; run `make exercises`, or name the folder by --exercises")
    return {path.stem: read(path) for path in paths}


def find(folder: Path, pristine: dict[str, list[Cell]], out: Path) -> list[Submission]:
    """All submissions below a folder, in the order of their paths.

    Raises:
        ValueError: the folder holds no notebook.
    """
    paths = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    paths = [path for path in paths if not path.parent.resolve().is_relative_to(out.resolve())]
    if not paths:
        raise ValueError(f"no notebook (*.ipynb) in {folder}; one folder per learner, or one file per learner")
    library = library_digest()
    return [_submission(path, folder, pristine, library) for path in paths]


def library_digest() -> str:
    """A digest of the code that decides: it must not change while submissions run."""
    digest = hashlib.sha256()
    for part in ("checks", "grading"):
        for path in sorted((LIBRARY / part).rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _submission(path: Path, folder: Path, pristine: dict[str, list[Cell]], library: str) -> Submission:
    relative = path.relative_to(folder)
    learner = relative.parts[0] if len(relative.parts) > 1 else path.stem
    problem, data, cells = "", b"", []
    try:
        data = _own_bytes(path, folder / relative.parts[0] if len(relative.parts) > 1 else folder)
        cells = parse(data)
    except Unreadable as error:
        problem = str(error)
    name = _exercise_of(path, cells, pristine)
    if not name:
        problem = problem or f"it answers none of {', '.join(pristine)}: no answer cell, and another file name"
    paper = overlay(pristine[name], cells) if name else Paper([])
    digest = hashlib.sha256(f"{library} {name} {pristine.get(name)} {problem}".encode())
    digest.update(data)
    return Submission(learner, name, _key(relative), digest.hexdigest(), paper, problem)


def _own_bytes(path: Path, own: Path) -> bytes:
    """Read a notebook that lies in the learner's own folder.

    Raises:
        Unreadable: it does not, or it is no file.
    """
    if not path.parent.resolve().is_relative_to(own.resolve()):
        raise Unreadable("it lies outside of the learner's folder; submit a copy of the notebook itself")
    return read_bytes(path)


def _key(relative: Path) -> str:
    """A short name for a path that is no other path's: what can be read of it, and a digest of all of it."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", str(relative.with_suffix("")))
    return f"{readable[:80]}-{hashlib.sha256(os.fsencode(relative)).hexdigest()[:16]}"


def _exercise_of(path: Path, cells: list[Cell], pristine: dict[str, list[Cell]]) -> str:
    topics = {topic_tags(found).most_common(1)[0][0]: name for name, found in pristine.items() if topic_tags(found)}
    for topic, _ in topic_tags(cells).most_common():
        if topic in topics:
            return topics[topic]
    return max((name for name in pristine if name in path.stem), key=len, default="")
