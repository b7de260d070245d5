"""Submissions: find them in a folder, and the exercise that each one answers.

`folder/maria/gpipe.ipynb` belongs to "maria"; in a flat folder `maria-gpipe.ipynb` belongs to "maria-gpipe".
The answer tags determine the exercise; without any, the file name does.  A learner may hand in the whole folder that
`make lab` made: copies of chapters, which answer nothing, are left out.  Files of a folder `mine` are answers, too:
each part is judged alone over the course's earlier parts, and the runs that call one of them as wholes.
"""

import json
import os
import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from dualpipe_course.grading.notebook import (
    Cell,
    Overlay,
    Task,
    Unreadable,
    is_chapter,
    overlay,
    parse,
    read,
    read_bytes,
    seed_in,
    topic_tags,
)
from dualpipe_course.grading.pristine import digest as library_digest
from dualpipe_course.own.parts import PARTS, RUNS, number_of
from dualpipe_course.own.runs import part_of
from dualpipe_course.retired import page_of


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
        path: where it lies.
        seed: of the learner's own numbers, if it has some.
    """

    learner: str
    notebook: str
    key: str
    digest: str
    overlay: Overlay
    problem: str = ""
    source: bytes = field(default=b"", repr=False)
    path: Path = Path()
    seed: int | None = None


def exercises(folder: Path) -> dict[str, list[Cell]]:
    """Return the pristine notebooks by name.

    Raises:
        ValueError: the folder has none.
    """
    paths = _notebooks(folder)
    if not paths:
        raise ValueError(f"no exercise notebook in {folder}; run `make exercises`, or name the folder by --exercises")
    return {path.stem: read(path) for path in paths}


def find(folder: Path, pristine: dict[str, list[Cell]], out: Path) -> list[Submission]:
    """Return all submissions below a folder, in the order of their paths.

    Raises:
        ValueError: the folder holds no notebook.
    """
    links = sorted(path for path in folder.iterdir() if path.is_symlink() and path.is_dir())  # each gets a row
    paths = [path for path in [*_notebooks(folder), *links] if not path.parent.resolve().is_relative_to(out.resolve())]
    library, files = library_digest(), _part_files(folder)
    if not paths and not files:
        raise ValueError(f"no notebook (*.ipynb) in {folder}; one folder per learner, or one file per learner")
    notebooks = _with_twins([_submission(path, folder, pristine, library) for path in paths if not _is_chapter(path)])
    by_files = [one for learner, own in files.items() for one in _of_files(learner, own, notebooks, pristine, library)]
    return [*notebooks, *by_files, *_runs([*notebooks, *by_files], library)]


def _part_files(folder: Path) -> dict[str, dict[str, str]]:
    """By learner, the texts of the parts in a folder `mine`; links are left out."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*/**/mine/*.py")):
        if path.stem in PARTS and path.is_file() and not path.is_symlink() and path.parent.resolve() == path.parent:
            learner = unicodedata.normalize("NFC", path.relative_to(folder).parts[0])
            with suppress(OSError, UnicodeDecodeError):
                found.setdefault(learner, {})[path.stem] = path.read_text(encoding="utf-8")
    return found


def _of_files(
    learner: str, texts: dict[str, str], notebooks: list[Submission], pristine: dict[str, list[Cell]], library: str
) -> list[Submission]:
    """The parts of a folder `mine`, each as the answer of its exercise; a notebook that is handed in wins."""
    handed_in = {one.notebook for one in notebooks if one.learner == learner}
    made = []
    for name, cells in pristine.items():
        tags = [cell.tag for cell in cells if cell.tag.startswith("answer-")]
        parts = {tag: part for tag in tags if (part := part_of(tag.removeprefix("answer-"))) in texts}
        if not parts or name in handed_in:
            continue
        found = overlay(cells, [Cell(tag, texts[part]) for tag, part in parts.items()])
        found = Overlay([task for task in found.tasks if f"answer-{task.name}" in parts])
        made.append(_made(learner, name, found, library))
    return made


def _runs(submitted: list[Submission], library: str) -> list[Submission]:
    """For each learner with parts the runs that call one of them, with all parts that are handed in."""
    texts: dict[str, dict[str, str]] = {}
    for one in submitted:
        for task in one.overlay.tasks:
            if (part := part_of(task.name)) and task.answer is not None and not task.untouched:
                texts.setdefault(one.learner, {})[part] = "\n\n".join(task.answer)
    made = []
    for learner, own in texts.items():
        answer = json.dumps(own, sort_keys=True)
        names = [number_of(run) for run, parts in RUNS.items() if set(parts) & set(own)]
        tasks = [Task(name, [], [answer], "", "") for name in names]
        made.append(_made(learner, "runs", Overlay(tasks), library))
    return made


def _made(learner: str, notebook: str, found: Overlay, library: str) -> Submission:
    digest = sha256(f"{library} {notebook} {found}".encode("utf-8", "surrogatepass")).hexdigest()
    key = _key(Path(learner, "mine", f"{notebook}.py"))
    return Submission(learner, notebook, key, digest, found)


def _notebooks(folder: Path) -> list[Path]:
    """Return the notebooks below a folder, without the copies that Jupyter keeps and what macOS puts beside files."""
    paths = (path for path in folder.rglob("*.ipynb") if not path.name.startswith("._"))
    return sorted(path for path in paths if not {".ipynb_checkpoints", "__MACOSX"} & set(path.parts))


def _is_chapter(path: Path) -> bool:
    """Whether a notebook says that it is the copy of a chapter, and answers nothing."""
    try:
        data = read_bytes(path)
        return not topic_tags(parse(data)) and is_chapter(data)
    except Unreadable:
        return False


def _submission(path: Path, folder: Path, pristine: dict[str, list[Cell]], library: str) -> Submission:
    relative = path.relative_to(folder)
    learner = unicodedata.normalize("NFC", relative.parts[0] if len(relative.parts) > 1 else path.stem)
    problem, data, cells = "", b"", []
    try:
        data = _read_inside(path, folder / relative.parts[0] if len(relative.parts) > 1 else folder)
        cells = parse(data)
    except Unreadable as error:
        problem = str(error)
    names = _exercises_of(path, cells, pristine)
    name = names[0] if names else ""
    if not name:
        problem = problem or _why_unknown(path, cells, pristine)
    seed = seed_in(data) if cells else None
    found = overlay(pristine[name], cells, seed) if name else Overlay([])
    if len(names) > 1:
        others = f"it answers {', '.join(names[1:])} too, which is not graded: hand in a notebook for each"
        found = replace(found, notes=[others, *found.notes])
    digest = sha256(f"{library} {name} {pristine.get(name)} {problem}".encode())
    digest.update(data)
    return Submission(learner, name, _key(relative), digest.hexdigest(), found, problem, data, path, seed)


def _with_twins(found: list[Submission]) -> list[Submission]:
    """Note which learners share a seed, which is drawn once for each, and who has none where others have one."""
    learners: dict[int | None, set[str]] = {}
    for one in found:
        learners.setdefault(one.seed, set()).add(one.learner)
    personal = {one.notebook for one in found if one.seed is not None}
    noted: list[Submission] = []
    for one in found:
        note = ""
        if one.seed is None and one.notebook in personal:
            note = "no seed of personal numbers: judged by the book's, whose answers are published"
        elif one.seed is not None and (others := sorted(learners[one.seed] - {one.learner})):
            note = f"the same seed of personal numbers, {one.seed}, as {', '.join(others)}"
        if note:
            digest = sha256(f"{one.digest} {note}".encode()).hexdigest()
            one = replace(one, overlay=replace(one.overlay, notes=[note, *one.overlay.notes]), digest=digest)
        noted.append(one)
    return noted


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
    return f"{readable[:80]}-{sha256(os.fsencode(relative)).hexdigest()[:16]}"


def _why_unknown(path: Path, cells: list[Cell], pristine: dict[str, list[Cell]]) -> str:
    """Say why a notebook answers no exercise of the course."""
    pages = [page for topic in [*topic_tags(cells), path.stem] if (page := page_of(topic))]
    if pages:
        return f"its exercises are no longer in the course; what they were about is in {pages[0]}"
    return f"it answers none of {', '.join(pristine)}: no answer cell, and another file name"


def _exercises_of(path: Path, cells: list[Cell], pristine: dict[str, list[Cell]]) -> list[str]:
    """Return the exercises that a notebook answers, the one with most answers first."""
    topics = {topic_tags(found).most_common(1)[0][0]: name for name, found in pristine.items() if topic_tags(found)}
    answered = [topics[topic] for topic, _ in topic_tags(cells).most_common() if topic in topics]
    return answered or sorted((name for name in pristine if name in path.stem), key=len)[-1:]
