"""All checks, topic by topic: what the progress page, the grader and the tests go through."""

from dualpipe_course import check as checks
from dualpipe_course.exercise import Check


def topic(name: str) -> list[Check]:
    """The checks of one topic, in the order of their numbers."""
    module = getattr(checks, name)
    found = [value for value in vars(module).values() if isinstance(value, Check)]
    return sorted(found, key=lambda check: int(check.name.rpartition("-")[2]))


def all_checks() -> list[Check]:
    """Every check of the course."""
    return [check for name in checks.TOPICS for check in topic(name)]


def find(name: str) -> Check | None:
    """The check of an exercise such as `gpipe-2`, if there is one."""
    return next((check for check in all_checks() if check.name == name), None)
