"""The checks that exercises call: `from dualpipe_course import check`, then `check.gpipe.makespan(answer)`.

One module per chapter, in the same folders as the chapters.  Each check takes the learner's answer, tries cases from
the smallest to the adversarial, looks at the mechanism, and prints one stable line or raises `CheckFailed`.
`check.gpipe.hint()` gives the next hint, `check.progress()` shows what is solved, `check.run("dense")` is one of the
four trainings by the learner's own parts.
With this module comes the package `mine`, the learner's own trainer (`own/`).
"""

from importlib import import_module
from typing import Any

from dualpipe_course.own import finder, folder
from dualpipe_course.registry import TOPICS, chapter

_NAMES = {
    "CheckFailed": "exercise",
    "progress": "progress_page",
    "all_checks": "registry",
    "topic": "registry",
    "run": "own.runs",
}


def __getattr__(name: str) -> Any:
    if name in TOPICS:
        return chapter(name)
    if name in _NAMES:
        return getattr(import_module(f"dualpipe_course.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are checks for {', '.join(TOPICS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *TOPICS, *_NAMES])


finder.install(folder.text_of)
