"""What a learner was given: per copy its place, its bytes and its text, in `.dualpipe-lab/copies.json`.

In: a workspace.  Out: entries by page, and the answer to "whose is this file?".  The file is replaced in one step; one
that cannot be read counts as empty, and then every file in the folder counts as the learner's.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from dualpipe_course import record

NAME = record.COPIES
LOCK = "lock"
OLD = "old"  # the folder of what was replaced


@dataclass(frozen=True)
class Given:
    """One file that was given out: where, the digest of its bytes, the digest of its text ("": not the course's)."""

    place: str
    data: str
    text: str


class Folder:
    """A workspace: its files, and the record of what was given out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.given = _read(self._record)

    @property
    def _record(self) -> Path:
        return self.path / record.FOLDER / NAME

    def save(self) -> None:
        """Write the record, if it is another one than on disk."""
        text = json.dumps({name: asdict(one) for name, one in sorted(self.given.items())}, indent=1)
        if not self._record.exists() or self._record.read_text(encoding="utf-8") != text:
            self.write(f"{record.FOLDER}/{NAME}", text.encode())

    def read(self, place: str) -> bytes | None:
        """Return the bytes at a place; nothing where no file is."""
        path = self.path / place
        return path.read_bytes() if path.is_file() else None

    def write(self, place: str, data: bytes) -> None:
        """Replace a file in one step."""
        path = self.path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        unfinished.write_bytes(data)
        os.replace(unfinished, path)

    def give(self, name: str, place: str, data: bytes, text: str) -> None:
        """Write a copy and note it."""
        self.write(place, data)
        self.given[name] = Given(place, digest(data), text)

    def take_back(self, name: str) -> bool:
        """Forget a copy, and remove it if nobody touched it; return whether a file of the learner's stays."""
        one = self.given.pop(name)
        data = self.read(one.place)
        if data is not None and digest(data) == one.data:
            (self.path / one.place).unlink()
            return False
        return data is not None

    def free(self, place: str) -> str:
        """Return a place where nothing is: the one given, or the same with a number."""
        path, number, found = Path(place), 2, place
        while (self.path / found).exists():
            found, number = path.with_name(f"{path.stem}-{number}{path.suffix}").as_posix(), number + 1
        return found

    def move(self, place: str, to: str) -> None:
        """Move a file to a place where nothing is, and remove the folder that this leaves empty."""
        target = self.path / to
        target.parent.mkdir(parents=True, exist_ok=True)
        (self.path / place).rename(target)
        self.tidy(place)

    def keep(self, place: str) -> str:
        """Move a file to `old/` under its date; return its new place."""
        path = Path(place)
        old = self.free(f"{OLD}/{path.with_suffix('')}.{date.today()}{path.suffix}")
        (self.path / old).parent.mkdir(parents=True, exist_ok=True)
        (self.path / place).rename(self.path / old)
        return old

    def tidy(self, place: str) -> None:
        """Remove the folder of a place if nothing is in it."""
        folder = (self.path / place).parent
        if folder != self.path and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process at a time change the folder; a second one waits."""
        (self.path / record.FOLDER).mkdir(parents=True, exist_ok=True)
        with (self.path / record.FOLDER / LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.given = _read(self._record)
            yield


def digest(data: bytes) -> str:
    """Return the digest of a file's bytes."""
    return hashlib.sha256(data).hexdigest()


def _read(path: Path) -> dict[str, Given]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {name: Given(*(str(one[key]) for key in ("place", "data", "text"))) for name, one in data.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
