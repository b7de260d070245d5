"""What a learner has solved: `.dualpipe-lab/progress.json` in the learner's course folder, or beside the notebook.

In: names of exercises.  Out: attempts, hints and solved marks.  The file is replaced in one step, so that a crash never
leaves half of one; a file that cannot be read counts as empty, and a folder that cannot be written is no error.
"""

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FOLDER = ".dualpipe-lab"
FILE = "progress.json"
SEED, MAX_SEED = "seed", 999_999  # draws the learner's own numbers of predict exercises
COPIES = "copies.json"  # stands beside it in a course folder, which has one record for all of its notebooks
MAX_EXERCISES = 1_000
MAX_COUNT = 1_000_000


@dataclass(frozen=True)
class Entry:
    """One exercise: whether it was ever solved, how often it was tried, how many hints were shown."""

    solved: bool = False
    attempts: int = 0
    hints: int = 0


NOTHING = Entry()


def path(folder: Path | None = None) -> Path:
    """Where the progress of notebooks in a folder, or in the current one, is kept."""
    return (folder or course_folder() or Path()) / FOLDER / FILE


def course_folder() -> Path | None:
    """The folder that `make lab` made around the current one, if there is one."""
    with contextlib.suppress(OSError):  # the current folder may be gone
        here = Path.cwd()
        return next((one for one in (here, *here.parents) if (one / FOLDER / COPIES).is_file()), None)
    return None


def is_compared() -> bool:
    """Whether nbval runs this notebook to compare its outputs: then nothing is written."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return "PYTEST_CURRENT_TEST" in os.environ and kernel is not None and bool(kernel.IPKernelApp.initialized())


def load(folder: Path | None = None) -> dict[str, Entry]:
    """Return what is known, by exercise; entries that make no sense are left out."""
    try:
        data = json.loads(path(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    entries = {name: _entry(value) for name, value in list(data.items())[:MAX_EXERCISES]}
    return {name: entry for name, entry in entries.items() if entry}


def seed(folder: Path | None = None) -> int | None:
    """The seed of a course folder, if it has one."""
    with contextlib.suppress(OSError, ValueError):
        found = int(path(folder).with_name(SEED).read_text(encoding="utf-8"))
        return found if 0 < found <= MAX_SEED else None
    return None


def note(name: str, passed: bool) -> bool:
    """Count an attempt; an exercise that was solved once stays solved.  Return whether it was not before."""
    known = load()
    entry = known.get(name, NOTHING)
    attempts = min(entry.attempts + 1, MAX_COUNT)
    _save(known | {name: replace(entry, solved=entry.solved or passed, attempts=attempts)})
    return passed and not entry.solved


def note_hint(name: str, number: int) -> None:
    """Note that hints up to `number` were shown."""
    known = load()
    _save(known | {name: replace(known.get(name, NOTHING), hints=number)})


def merge(entries: dict[str, Entry], folder: Path) -> None:
    """Add what is known elsewhere to the record of a folder; what is solved in either is solved."""
    known = load(folder)
    for name, other in entries.items():
        own = known.get(name, NOTHING)
        counts = (max(own.attempts, other.attempts), max(own.hints, other.hints))
        known[name] = Entry(own.solved or other.solved, *counts)
    if entries:
        _save(known, folder)


def _entry(value: object) -> Entry | None:
    if not isinstance(value, dict):
        return None
    counts = [value.get(name, 0) for name in ("attempts", "hints")]
    if not all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts):
        return None
    return Entry(value.get("solved") is True, *counts)


def _save(entries: dict[str, Entry], folder: Path | None = None) -> None:
    if is_compared() and course_folder():
        return
    text = json.dumps({name: asdict(entry) for name, entry in sorted(entries.items())}, indent=1)
    with contextlib.suppress(OSError):  # a read-only folder must not spoil a right answer
        target = path(folder)
        target.parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, target)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
