"""Overlay of a submission on its pristine exercise: answer cells are found by their tags.

In: two notebooks.  Out: per exercise the given cells, the learner's answer and the pristine check; notes on edits.
An answer is what "Restart and run all" runs before the check: several cells with its tag count one after the other.
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

from dualpipe_course.personal import seed_of, variants_of, with_seed

MAX_BYTES = 20_000_000
_KEYS = re.compile(r"\bdualpipe_course\.(?!check\b)[\w.]+|\bdualpipe_course\b(?! +import +check\b)|['\"/]solutions\b")


class Unreadable(ValueError):  # noqa: N818
    """The file is not a readable notebook."""


class Cell(NamedTuple):
    """A cell: its answer or check tag, or an empty string, and its text."""

    tag: str
    source: str
    kind: str = "code"


@dataclass(frozen=True)
class Task:
    """One exercise of one submission; `answer` has the cells that count, or is None, and `lacks` says why."""

    name: str
    given: list[str]
    answer: list[str] | None
    starter: str
    check: str
    lacks: str = ""

    @property
    def untouched(self) -> bool:
        """Whether the answer cell is unchanged."""
        return self.answer is not None and all(part.strip() == self.starter.strip() for part in self.answer)


@dataclass(frozen=True)
class Overlay:
    """The tasks of a submission, and notes on its edited cells."""

    tasks: list[Task]
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> list[Cell]:
    """Return the code cells of a notebook, and others that are tagged as answers.

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
    """Return the code cells in the bytes of a notebook, and others that are tagged as answers.

    Raises:
        Unreadable: it is not a notebook of format 4.
    """
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
        cells = [_cell(cell) for cell in notebook["cells"]]
        return [cell for cell in cells if cell.kind == "code" or cell.tag.startswith("answer-")]
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
    """Combine the learner's answers with the pristine cells."""
    if seed is not None:
        pristine = [
            cell._replace(source=with_seed(cell.source, seed)) if variants_of([cell.tag]) else cell for cell in pristine
        ]
    given = [cell.source for cell in pristine if not cell.tag]
    checks = {cell.tag: cell.source for cell in pristine if cell.tag.startswith("check-")}
    tasks = []
    answers = {}
    for tag, starter, _ in pristine:
        if tag.startswith("answer-"):
            name = tag.removeprefix("answer-")
            answers[tag] = answer = _answer(tag, starter, submitted)
            lacks = "" if answer else _why_none(tag, submitted)
            tasks.append(Task(name, given, answer or None, starter, checks[f"check-{name}"], lacks))
    return Overlay(tasks, list(_notes(pristine, submitted, answers)))


def _answer(tag: str, starter: str, submitted: list[Cell]) -> list[str]:
    """Return the cells of an answer that stand before its last check, without a starter below a cell of one's own."""
    places = [place for place, cell in enumerate(submitted) if cell.tag == tag.replace("answer-", "check-", 1)]
    before = submitted[: places[-1]] if places else submitted
    parts: list[str] = []
    for cell in before:
        is_starter = cell.source.strip() == starter.strip()
        if cell.tag == tag and cell.kind == "code" and not (is_starter and parts):
            parts.append(cell.source)
    return parts


def _why_none(tag: str, submitted: list[Cell]) -> str:
    kinds = [cell.kind for cell in submitted if cell.tag == tag]
    if "code" in kinds:
        return f"the cell tagged {tag} stands below its check, which runs first; move it above the check"
    if kinds:
        return f"the cell tagged {tag} is a {kinds[0].capitalize()} cell; make it a Code cell again (Esc, then Y)"
    return f"there is no cell tagged {tag}; copy the answer into a fresh exercise notebook"


def topic_tags(cells: Iterable[Cell]) -> Counter[str]:
    """Count the occurrences of each topic in the answer tags."""
    names = [cell.tag.removeprefix("answer-").rpartition("-")[0] for cell in cells if cell.tag.startswith("answer-")]
    return Counter(names)


def _cell(cell: Any) -> Cell:
    source = cell["source"]
    text = source if isinstance(source, str) else "".join(source)
    tags = cell.get("metadata", {}).get("tags", [])
    wanted = [tag for tag in tags if isinstance(tag, str) and tag.startswith(("answer-", "check-"))]
    return Cell(wanted[0] if wanted else "", text, str(cell["cell_type"]))


def _notes(pristine: list[Cell], submitted: list[Cell], answers: dict[str, list[str]]) -> Iterable[str]:
    ours = {cell.tag: cell.source.strip() for cell in pristine if cell.tag.startswith("check-")}
    for tag, source, _ in submitted:
        if tag in ours and source.strip() != ours[tag]:
            yield f"{tag} was edited: ignored"
    known = {cell.tag for cell in pristine}
    given = [cell.source.strip() for cell in pristine if not cell.tag]
    extra = [cell for cell in submitted if cell.tag not in known or (not cell.tag and cell.source.strip() not in given)]
    if extra := [cell for cell in extra if cell.source.strip()]:
        yield f"{len(extra)} extra or edited cell{'s' * (len(extra) > 1)}: ignored"
    for tag, parts in answers.items():
        cells = [cell for cell in submitted if cell.tag == tag and cell.kind == "code"]
        if len(cells) > 1:
            yield f"{tag} occurs {len(cells)} times: {len(parts)} of these cells count, those before the check"
        if names := sorted({found[0].lstrip("'\"/") for found in _KEYS.finditer("\n".join(parts))}):
            yield f"{tag} names {', '.join(names)}, where answers are: they are closed to it; read this answer"
