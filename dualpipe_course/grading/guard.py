"""The guard: what an answer cannot read while it is judged, namely checks and solutions.

In: a process that is about to run a learner's code.  Out: there, an answer's imports of checks raise ImportError, and
files of the course are not opened for it.
A rank has imported the check that called it, so the frame that asks decides: code of the course may, an answer may not.
"""

import builtins
import importlib
import os
import sys
from types import FrameType
from typing import Any

from dualpipe_course import check
from dualpipe_course.registry import TOPICS, chapter

COURSE = "dualpipe_course"
SECRET_FOLDERS = (f"{os.sep}solutions{os.sep}", f"{os.sep}{COURSE}{os.sep}")
KEY = "grading.key"
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TRUSTED = (f"{_OWN}{COURSE}{os.sep}", f"{_OWN}dualpipe_lab{os.sep}", "given cell")
_PASSED_BY = ("<frozen", sys.prefix + os.sep, sys.base_prefix + os.sep)  # Python's own code, and installed packages
refusals: list[str] = []


def close() -> None:
    """Guard this process for the rest of its life."""
    if builtins.__import__ is _guarded_import:
        return
    builtins.__import__ = _guarded_import
    importlib.import_module = _guarded_import_module
    check.__getattr__ = _shown
    sys.addaudithook(_listen)


class Topic:
    """The checks of a topic as an answer sees them: calling one does nothing, and only what is shown has a value."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = chapter(self._name).module
        if name in getattr(module, "SHOWN", ()):
            return getattr(module, name)
        if name in vars(module) and not callable(vars(module)[name]):
            refusals.append(f"check.{self._name}.{name}")
        return _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a check or a hint."""


_check_getattr = check.__getattr__
_import, _import_module = builtins.__import__, importlib.import_module


def _shown(name: str) -> Any:
    return Topic(name) if name in TOPICS and _is_asked_by_an_answer(sys._getframe(1)) else _check_getattr(name)


def _guarded_import(name: str, *places: Any, **more: Any) -> Any:
    if name.startswith(COURSE) and not _is_open(name, more.get("fromlist", places[2] if len(places) > 2 else ())):
        _refuse_answer(name, sys._getframe(1))
    return _import(name, *places, **more)


def _guarded_import_module(name: str, package: str | None = None) -> Any:
    if f"{package or ''}{name}".startswith(COURSE) and not _is_open(name, ()):
        _refuse_answer(name, sys._getframe(1))
    return _import_module(name, package)


def _is_open(name: str, fromlist: Any) -> bool:
    """Whether anybody may import this: `from dualpipe_course import check`."""
    return name == f"{COURSE}.check" or (name == COURSE and tuple(fromlist or ()) == ("check",))


def _refuse_answer(name: str, frame: FrameType | None) -> None:
    if _is_asked_by_an_answer(frame):
        refusals.append(f"import {name}")
        raise ImportError(f"an answer cannot import {name}: checks are closed while it is judged")


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path = arguments[0]
        text = os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, bytes)) else ""
        is_secret = any(folder in text for folder in SECRET_FOLDERS) or text.endswith(KEY)
        if is_secret and _is_asked_by_an_answer(sys._getframe(1)):
            refusals.append(f"open {os.path.basename(text)}")
            raise PermissionError(f"an answer cannot open {text}: the course's files are closed while it is judged")
    elif event == "import" and str(arguments[0]).startswith(f"{COURSE}.") and not _is_open(arguments[0], ()):
        _refuse_answer(arguments[0], sys._getframe(1))


def _is_asked_by_an_answer(frame: FrameType | None) -> bool:
    """Whether the innermost frame that is neither Python's own nor an installed package's is an answer's."""
    while frame is not None:
        place = frame.f_code.co_filename
        if place.startswith(_TRUSTED):
            return False
        if not place.startswith(_PASSED_BY):
            return True
        frame = frame.f_back
    return False
