"""Marks by nbval: what pytest does in a folder of grafted notebooks, and the points that it prints at the end.

The `conftest.py` that graft writes takes these hooks from here.  A check that passes earns its points, any other none.
The report for machines (`--junitxml`) has learner, exercise and points as properties of each check's cell.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dualpipe_course import registry

SANITIZE = Path(__file__).with_name("solved.cfg")
CELL_SECONDS = 120


@pytest.hookimpl(tryfirst=True)  # before the plugins read their options
def pytest_configure(config: pytest.Config) -> None:
    """Set what was not typed."""
    option = config.option
    option.nbval_sanitize_with = option.nbval_sanitize_with or str(SANITIZE)
    if not any(str(arg).startswith("--nbval-cell-timeout") for arg in config.invocation_params.args):
        option.nbval_cell_timeout = CELL_SECONDS
    option.nbval_current_env = not option.nbval_kernel_name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name learner, exercise and points of each check."""
    for item in items:
        cell: Any = item
        learner = _learner(item)
        names = [tag.removeprefix("check-") for tag in _tags(item) if tag.startswith("check-")]
        if learner and names and (check := registry.find(names[0])):
            item.user_properties += [("learner", learner), ("exercise", check.name), ("points", check.about.points)]
            cell.parent.skip_compare = (*cell.parent.skip_compare, "stderr")  # warnings are no part of an answer


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Judge what comes after a cell that took too long: nbval by itself expects all of it to fail, and says nothing."""
    item.parent.timed_out = False


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line for each learner and notebook."""
    rows: dict[tuple[str, str, str], list[tuple[str, int, bool]]] = {}
    for file, properties, passed in _judged(terminalreporter.stats):
        topic, _, number = properties["exercise"].rpartition("-")
        rows.setdefault((properties["learner"], topic, file), []).append((number, properties["points"], passed))
    if rows:
        terminalreporter.section("points")
    for (learner, topic, _), marks in rows.items():
        signs = " ".join(f"{number}{'✓' if passed else '✗'}" for number, _, passed in marks)
        earned, out_of = sum(points for _, points, passed in marks if passed), sum(points for _, points, _ in marks)
        terminalreporter.line(f"{learner}  {topic}  {signs}  {earned} / {out_of}")


def _judged(stats: dict[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """The file of each check, its properties, and whether it passed, in the order of the cells."""
    reports = [report for each in stats.values() for report in each if _is_verdict(report)]
    for report in sorted(reports, key=lambda report: (report.location[0], int(report.nodeid.rpartition(" ")[2]))):
        if "exercise" in (properties := dict(report.user_properties)):
            yield report.location[0], properties, report.outcome == "passed" and not hasattr(report, "wasxfail")


def _is_verdict(report: Any) -> bool:
    """Whether a report is about the run of a cell, or about a kernel that did not start."""
    when = getattr(report, "when", "")
    return when == "call" or (when == "setup" and report.outcome == "failed")


def _learner(item: Any) -> str:
    notebook = getattr(item.parent, "nb", None)
    return str(notebook.metadata.get("dualpipe_lab", {}).get("learner", "")) if notebook else ""


def _tags(item: Any) -> list[str]:
    return list(item.cell.metadata.get("tags", [])) if hasattr(item, "cell") else []
