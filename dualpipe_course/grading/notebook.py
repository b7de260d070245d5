"""Overlay of a submission on its pristine exercise: answer cells are found by their tags.

In: two notebooks.  Out: per exercise the given cells, the learner's answer and the pristine check; notes on edits.
A check asks for the numbers of the seed that the submission carries.
A notebook is read as JSON; no cell is executed here.
"""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe_course.variants import seed_of, variants_of, with_seed

MAX_BYTES = 20_000_000
_KEYS = re.compile(r"\bdualpipe_course\.(?!check\b)[\w.]+|\bdualpipe_course\b(?! +import +check\b)|['\"/]solutions\b")


class Unreadable(ValueError):  # noqa: N818
    """The file is not a readable notebook."""


class Cell(NamedTuple):
    """A code cell: its answer or check tag, or an empty string, and its text."""

    tag: str
    source: str


@dataclass(frozen=True)
class Task:
    """One exercise of one submission; `answer` is None if the submission lacks the answer cell."""

    name: str
    given: list[str]
    answer: str | None
    starter: str
    check: str

    @property
    def untouched(self) -> bool:
        """Whether the answer cell is unchanged."""
        return self.answer is not None and self.answer.strip() == self.starter.strip()


@dataclass(frozen=True)
class Overlay:
    """The tasks of a submission, and notes on its edited cells."""

    tasks: list[Task]
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> list[Cell]:
    """Return the code cells of a notebook.

    Raises:
        Unreadable: it is not a regular file of at most 20 MB with a notebook of format 4.
    """
    return parse(read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """Read a regular file once; do not follow a link or wait for a pipe.

    Raises:
        Unreadable: it is something else, larger than 20 MB, or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Unreadable("a link, a folder or a special file; submit a copy of the notebook itself")
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = file.read(MAX_BYTES + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError as error:
        raise Unreadable(f"it cannot be read ({error.strerror}); submit it again") from None
    if len(found) > MAX_BYTES:
        raise Unreadable(f"larger than {MAX_BYTES // 1_000_000} MB; clear its outputs and submit again")
    return found


def parse(data: bytes) -> list[Cell]:
    """Return the code cells in the bytes of a notebook.

    Raises:
        Unreadable: it is not a notebook of format 4.
    """
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
        return [_cell(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"no notebook of format 4 ({type(error).__name__}); save it from Jupyter again") from None


def is_chapter(data: bytes) -> bool:
    """Return whether a notebook is the copy of a chapter that `make lab` gives out."""
    try:
        return str(json.loads(data)["metadata"]["dualpipe_lab"]["page"]).startswith("book/")
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def seed_in(data: bytes) -> int | None:
    """Return the seed of a notebook with numbers of the learner's own."""
    try:
        return seed_of(json.loads(data.decode("utf-8-sig")))
    except (ValueError, RecursionError):
        return None


def overlay(pristine: list[Cell], submitted: list[Cell], seed: int | None = None) -> Overlay:
    """Combine the learner's answers with the pristine cells; the pieces of a split answer cell are joined in order."""
    if seed is not None:
        pristine = [
            Cell(tag, with_seed(text, seed)) if variants_of([tag]) else Cell(tag, text) for tag, text in pristine
        ]
    answers: dict[str, list[str]] = {}
    for tag, source in submitted:
        if tag.startswith("answer-"):
            answers.setdefault(tag, []).append(source)
    given = [cell.source for cell in pristine if not cell.tag]
    checks = {cell.tag: cell.source for cell in pristine if cell.tag.startswith("check-")}
    tasks = []
    for tag, starter in pristine:
        if tag.startswith("answer-"):
            name = tag.removeprefix("answer-")
            parts = answers.get(tag)
            answer = "\n".join(parts) if parts is not None else None
            tasks.append(Task(name, given, answer, starter, checks[f"check-{name}"]))
    return Overlay(tasks, list(_notes(pristine, submitted, answers)))


def topic_tags(cells: Iterable[Cell]) -> Counter[str]:
    """Count the occurrences of each topic in the answer tags."""
    names = [cell.tag.removeprefix("answer-").rpartition("-")[0] for cell in cells if cell.tag.startswith("answer-")]
    return Counter(names)


def _cell(cell: Any) -> Cell:
    source = cell["source"]
    text = source if isinstance(source, str) else "".join(source)
    tags = cell.get("metadata", {}).get("tags", [])
    wanted = [tag for tag in tags if isinstance(tag, str) and tag.startswith(("answer-", "check-"))]
    return Cell(wanted[0] if wanted else "", text)


def _notes(pristine: list[Cell], submitted: list[Cell], answers: dict[str, list[str]]) -> Iterable[str]:
    ours = {cell.tag: cell.source.strip() for cell in pristine if cell.tag.startswith("check-")}
    for tag, source in submitted:
        if tag in ours and source.strip() != ours[tag]:
            yield f"{tag} was edited: ignored"
    known = {cell.tag for cell in pristine}
    given = [cell.source.strip() for cell in pristine if not cell.tag]
    extra = [cell for cell in submitted if cell.tag not in known or (not cell.tag and cell.source.strip() not in given)]
    if extra := [cell for cell in extra if cell.source.strip()]:
        yield f"{len(extra)} extra or edited cell{'s' * (len(extra) > 1)}: ignored"
    for tag, parts in answers.items():
        if tag in known and len(parts) > 1:
            yield f"{tag} occurs {len(parts)} times: joined"
        if tag in known and (names := sorted({found[0].lstrip("'\"/") for found in _KEYS.finditer("\n".join(parts))})):
            yield f"{tag} names {', '.join(names)}, where answers are: they are closed to it; read this answer"
