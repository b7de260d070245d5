"""What a learner has solved, kept in the learner's own folder: `.dualpipe-lab/progress.json` beside the notebook.

In: names of exercises.  Out: attempts, hints and solved marks.  The file is replaced in one step, so that a crash never
leaves half of one; a file that cannot be read counts as empty, and a folder that cannot be written is no error.
"""

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FOLDER = ".dualpipe-lab"
MAX_EXERCISES = 1_000
MAX_COUNT = 1_000_000


@dataclass(frozen=True)
class Entry:
    """One exercise: whether it was ever solved, how often it was tried, how many hints were shown."""

    solved: bool = False
    attempts: int = 0
    hints: int = 0


NOTHING = Entry()


def path() -> Path:
    """Where the progress of notebooks in this folder is kept."""
    return Path(FOLDER) / "progress.json"


def load() -> dict[str, Entry]:
    """Return what is known, by exercise; entries that make no sense are left out."""
    try:
        data = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    entries = {name: _entry(value) for name, value in list(data.items())[:MAX_EXERCISES]}
    return {name: entry for name, entry in entries.items() if entry}


def note(name: str, passed: bool) -> None:
    """Count an attempt; an exercise that was solved once stays solved."""
    known = load()
    entry = known.get(name, NOTHING)
    attempts = min(entry.attempts + 1, MAX_COUNT)
    _save(known | {name: replace(entry, solved=entry.solved or passed, attempts=attempts)})


def note_hint(name: str, number: int) -> None:
    """Note that hints up to `number` were shown."""
    known = load()
    _save(known | {name: replace(known.get(name, NOTHING), hints=number)})


def _entry(value: object) -> Entry | None:
    if not isinstance(value, dict):
        return None
    counts = [value.get(name, 0) for name in ("attempts", "hints")]
    if not all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts):
        return None
    return Entry(value.get("solved") is True, *counts)


def _save(entries: dict[str, Entry]) -> None:
    text = json.dumps({name: asdict(entry) for name, entry in sorted(entries.items())}, indent=1)
    with contextlib.suppress(OSError):  # a read-only folder must not spoil a right answer
        path().parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path().parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path())
        except OSError:
            Path(temporary).unlink(missing_ok=True)
