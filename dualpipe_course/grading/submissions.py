"""Submissions: find them in a folder, and the exercise that each one answers.

`folder/maria/gpipe.ipynb` belongs to "maria"; in a flat folder `maria-gpipe.ipynb` belongs to "maria-gpipe".
The answer tags determine the exercise; without any, the file name does.  A learner may hand in the whole folder that
`make lab` made: copies of chapters, which answer nothing, are left out.
"""

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from dualpipe_course.grading.notebook import (
    Cell,
    Overlay,
    Unreadable,
    is_chapter,
    overlay,
    parse,
    read,
    read_bytes,
    topic_tags,
)
from dualpipe_course.retired import page_of

COURSE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Submission:
    """One submitted notebook.

    Attributes:
        learner, notebook: the learner, and the exercise notebook that it answers ("" if unknown).
        key: its name in the folder of results, unique per path.
        digest: hash of the submission, the exercise and the checks.
        overlay: its tasks.
        problem: why it cannot be evaluated, or an empty string.
        source: the notebook as it was handed in.
    """

    learner: str
    notebook: str
    key: str
    digest: str
    overlay: Overlay
    problem: str = ""
    source: bytes = field(default=b"", repr=False)


def exercises(folder: Path) -> dict[str, list[Cell]]:
    """Return the pristine notebooks by name.

    Raises:
        ValueError: the folder has none.
    """
    paths = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not paths:
        raise ValueError(f"no exercise notebook in {folder}; run `make exercises`, or name the folder by --exercises")
    return {path.stem: read(path) for path in paths}


def find(folder: Path, pristine: dict[str, list[Cell]], out: Path) -> list[Submission]:
    """Return all submissions below a folder, in the order of their paths.

    Raises:
        ValueError: the folder holds no notebook.
    """
    paths = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    paths = [path for path in paths if not path.parent.resolve().is_relative_to(out.resolve())]
    if not paths:
        raise ValueError(f"no notebook (*.ipynb) in {folder}; one folder per learner, or one file per learner")
    library = library_digest()
    return [_submission(path, folder, pristine, library) for path in paths if not _is_chapter(path)]


def library_digest() -> str:
    """Return a digest of checks and grading, which must not change while submissions run."""
    digest = hashlib.sha256()
    for path in sorted([*COURSE.rglob("*.py"), *COURSE.rglob("*.cfg")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _is_chapter(path: Path) -> bool:
    """Whether a notebook says that it is the copy of a chapter, and answers nothing."""
    try:
        data = read_bytes(path)
        return not topic_tags(parse(data)) and is_chapter(data)
    except Unreadable:
        return False


def _submission(path: Path, folder: Path, pristine: dict[str, list[Cell]], library: str) -> Submission:
    relative = path.relative_to(folder)
    learner = relative.parts[0] if len(relative.parts) > 1 else path.stem
    problem, data, cells = "", b"", []
    try:
        data = _read_inside(path, folder / relative.parts[0] if len(relative.parts) > 1 else folder)
        cells = parse(data)
    except Unreadable as error:
        problem = str(error)
    name = _exercise_of(path, cells, pristine)
    if not name:
        problem = problem or _why_unknown(path, cells, pristine)
    found = overlay(pristine[name], cells) if name else Overlay([])
    digest = hashlib.sha256(f"{library} {name} {pristine.get(name)} {problem}".encode())
    digest.update(data)
    return Submission(learner, name, _key(relative), digest.hexdigest(), found, problem, data)


def _read_inside(path: Path, folder: Path) -> bytes:
    """Read a notebook inside the learner's folder.

    Raises:
        Unreadable: it lies elsewhere, or is not a file.
    """
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise Unreadable("it lies outside of the learner's folder; submit a copy of the notebook itself")
    return read_bytes(path)


def _key(relative: Path) -> str:
    """Return a short unique name of a path: its readable characters and a digest."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", str(relative.with_suffix("")))
    return f"{readable[:80]}-{hashlib.sha256(os.fsencode(relative)).hexdigest()[:16]}"


def _why_unknown(path: Path, cells: list[Cell], pristine: dict[str, list[Cell]]) -> str:
    """Say why a notebook answers no exercise of the course."""
    pages = [page for topic in [*topic_tags(cells), path.stem] if (page := page_of(topic))]
    if pages:
        return f"its exercises are no longer in the course; what they were about is in {pages[0]}"
    return f"it answers none of {', '.join(pristine)}: no answer cell, and another file name"


def _exercise_of(path: Path, cells: list[Cell], pristine: dict[str, list[Cell]]) -> str:
    topics = {topic_tags(found).most_common(1)[0][0]: name for name, found in pristine.items() if topic_tags(found)}
    for topic, _ in topic_tags(cells).most_common():
        if topic in topics:
            return topics[topic]
    return max((name for name in pristine if name in path.stem), key=len, default="")
