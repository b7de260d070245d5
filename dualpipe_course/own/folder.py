"""`mine/` in the learner's folder: one file per part, `.passed.json` with the hash of each last pass, `old/`.

A part counts as the learner's while its file has the hash of its last pass.  Nothing is written outside of a folder
that `make lab` made, and nothing while nbval runs: there a pass is kept in memory.
"""

import hashlib
import json
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Literal

from dualpipe_course import record
from dualpipe_course.own import finder
from dualpipe_course.own.parts import PARTS, version
from dualpipe_course.wrong import Wrong

NAME, PASSED, OLD = "mine", ".passed.json", "old"
State = Literal["own", "edited", "older", "missing"]
INIT = '''\
"""Your own trainer, one file per part, in the order of the trail.

A check that passes writes `<part>.py`.  You may edit the files and hand them to the same check, by take="file"; what
was there before goes to `old/`.  In place of a part that you have not written, or have edited since its last pass, the
course's own runs.
"""

from pathlib import Path

from dualpipe_course.own import folder

folder.begin(Path(__file__).parent)
'''
_REASONS = {
    "edited": "is edited and not checked",
    "older": "was written for an older signature",
    "missing": "is not written yet",
}
_in_memory: dict[str, str] = {}  # of the notebook that nbval runs
_said: set[str] = set()
_begun: list[Path] = []  # by a program that imports the package from its folder


def folder() -> Path | None:
    """The learner's package, if there is one to write to."""
    course = None if record.is_compared() else record.course_folder()
    if course and (course / NAME).is_dir():
        return course / NAME
    return _begun[0] if _begun else None


def make(course: Path) -> None:
    """Make the package in a learner's folder; what is there stays."""
    (course / NAME).mkdir(exist_ok=True)
    if not (course / NAME / "__init__.py").exists():
        _write(course / NAME / "__init__.py", INIT)


def begin(mine: Path) -> None:
    """Let a program that imports the package find its parts."""
    _begun[:] = [mine]
    finder.install(text_of, is_importing=True)


def state(part: str, mine: Path | None = None) -> State:
    """Whose a part is: own, edited since its last pass, written for an older signature, or missing."""
    mine = mine or folder()
    if mine is None or (text := _read(mine, part)) is None:
        return "missing"
    passed = _passed(mine).get(part, {})
    if passed.get("text") != _hash(text):
        return "edited"
    return "own" if passed.get("version") == version(part) else "older"


def is_own(part: str) -> bool:
    """Whether a part is the learner's, on disk or in memory."""
    return part in _in_memory or state(part) == "own"


def states(mine: Path | None = None) -> dict[str, State]:
    """The state of every part."""
    return {part: state(part, mine) for part in PARTS}


def text_of(part: str) -> str:
    """What `mine.<part>` is in a notebook: the learner's text, or the course's, and then one line says so."""
    found = text(part)
    if folder() and not is_own(part) and part not in _said:
        _said.add(part)
        print(f"{NAME}.{part} {_REASONS[state(part)]}: the course's own runs")
    return found


def text(part: str) -> str:
    """The learner's text of a part that counts as theirs, else the course's."""
    if part in _in_memory:
        return _in_memory[part]
    mine = folder()
    own = _read(mine, part) if mine and state(part, mine) == "own" else None
    return finder.official(part) if own is None else own


def name_official(parts: Iterable[str]) -> None:
    """Say in one line for which of these parts the course's own run, once in a notebook."""
    missing = [part for part in parts if folder() and not is_own(part) and part not in _said]
    if missing:
        _said.update(missing)
        print(f"the course's own run for {', '.join(missing)}")


def choose(part: str, cell: str, take: str) -> str:
    """Return the text to judge: that of the cell or that of the file.

    Raises:
        Wrong: both have changed since the last pass, and nobody says which one counts.
    """
    mine = folder()
    text = _read(mine, part) if mine else None
    if take not in ("", "cell", "file"):
        raise ValueError(f'take="{take}" is not known; use take="cell" or take="file"')
    if take == "file":
        if text is None:
            raise Wrong(f"there is no file {NAME}/{part}.py; leave take away, and the cell counts")
        return text
    if take == "" and text is not None and text != cell and state(part, mine) == "edited":
        raise Wrong(
            f'{NAME}/{part}.py was edited since its last pass, and this cell is another text: take="file" judges the '
            f'file, take="cell" the cell and keeps the file in {NAME}/{OLD}/'
        )
    return cell


def keep(part: str, text: str) -> str:
    """Note that a text has passed: the file becomes that text, another one goes to `old/`; return where it is."""
    _said.discard(part)
    mine = folder()
    if mine is None:
        _in_memory[part] = text
        return ""
    before = _read(mine, part)
    if before != text:
        if before is not None:
            old = mine / OLD
            old.mkdir(exist_ok=True)
            number = sum(one.name.startswith(f"{part}.{date.today()}") for one in old.iterdir())
            (mine / f"{part}.py").replace(old / f"{part}.{date.today()}{f'-{number + 1}' if number else ''}.py")
        _write(mine / f"{part}.py", text)
    known = _passed(mine) | {part: {"text": _hash(text), "version": version(part)}}
    _write(mine / PASSED, json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return f"{NAME}/{part}.py"


def _read(mine: Path, part: str) -> str | None:
    try:
        return (mine / f"{part}.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _passed(mine: Path) -> dict[str, dict[str, object]]:
    try:
        known = json.loads((mine / PASSED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {part: one for part, one in known.items() if isinstance(one, dict)} if isinstance(known, dict) else {}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
