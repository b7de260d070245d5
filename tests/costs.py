"""What tests cost, how many cases of each run by default, in which order, and the budget of each directory.

measured.csv   processor seconds of one case, by test; `make measure` writes it
budgets.csv    processor seconds, launches and ranks of a default run, by directory; `make measure` writes it, too
A test runs as many of its cases as its allowance pays for, at least one, drawn with a fixed seed; `--allowance 8`,
as in continuous integration, pays for eight times as many, and `--every` for all.
A test that the file does not name is taken for a cheap one.
Processor seconds are those of the test's process, of its ended children, and of the fork server with its ranks.  They
are divided by the machine's seconds for a fixed loop, so that a slower machine has about the same figures.  What a loop
does not show, such as slow starts of processes, all directories share: budgets of seconds are multiplied by the median
of the directories' ratios, if that is above 1, and a directory fails that is a fifth over.  Where a browser does the
work, which nobody here can count, they are seconds of the clock.
"""

import csv
import functools
import importlib
import os
import random
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MEASURED, BUDGETS = HERE / "measured.csv", HERE / "budgets.csv"
ALLOWANCE, IN_BROWSER = 3.0, 12.0  # seconds of one test's cases
CHEAP = 0.02  # a case below is not written down: all of them run
OVER = 1.2  # times its budget: then a directory fails the run
LARGE = 20  # seconds: budgets that show the machine's pace
WAITING = (  # files whose tests wait most of the time: for signals, time limits, kernels and torchrun
    "drills/test_grading_drills.py", "drills/test_launch_drills.py", "launch/test_clocks.py",
    "launch/test_cluster_join.py", "launch/test_emulated_hosts.py",
    "launch/test_failures.py", "launch/test_kernel.py", "launch/test_stand_in.py", "launch/test_torchrun.py",
    "test_kernels.py", "train/test_elastic.py",
)  # fmt: skip
LOOP = 0.095  # processor seconds of the fixed loop on the machine whose seconds are written down


def drawn(items, times=1):
    """The items that run by default, in their order.

    Args:
        items: what pytest has collected.
        times: the usual allowance.
    """
    seconds = _measured()
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("every") is None:
            cases[name_of(item.nodeid)].append(item)
    left = set()
    for name, group in cases.items():
        allowance = IN_BROWSER if _is_in_browser(group[0]) else ALLOWANCE
        number = max(1, int(times * allowance / seconds.get(name, CHEAP)))
        left.update(random.Random(name).sample(group, min(number, len(group))))
    return [item for item in items if item in left]


def _is_in_browser(item):
    return item.get_closest_marker("browser") is not None


def sort(items):
    """Put files that wait first, which one worker takes, then long ones: a late start would leave the others idle."""
    seconds = _measured()
    files = Counter()
    for item in items:
        files[item.path] += seconds.get(name_of(item.nodeid), CHEAP)
    items.sort(key=lambda item: (not waits(item.nodeid), -files[item.path]))


def waits(nodeid):
    """Tell whether a test is in a file that mostly waits."""
    return name_of(nodeid).partition("::")[0] in WAITING


def is_dear(item):
    """Tell whether one case takes more than two processor seconds."""
    return _measured().get(name_of(item.nodeid), 0) > 2


def some(cases, number):
    """Return so many of a list or of a table, in their order."""
    chosen = set(random.Random(len(cases)).sample(range(len(cases)), min(number, len(cases))))
    if isinstance(cases, dict):
        return {name: case for place, (name, case) in enumerate(cases.items()) if place in chosen}
    return [case for place, case in enumerate(cases) if place in chosen]


def name_of(nodeid):
    """The test of a case."""
    return nodeid.split("[")[0].split("@")[0].removeprefix("tests/")


def directory_of(name):
    """The row of budgets.csv that a test belongs to."""
    if name.startswith("dualpipe"):
        return "doctests"
    return name.split("/")[0] if "/" in name else "."


def _rows(path):
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@functools.cache
def _measured():
    return {row["test"]: float(row["seconds"]) for row in _rows(MEASURED)}


def _exists(name):
    file, _, test = name.partition("::")
    return (HERE / file).exists() and test.rpartition("::")[2] in (HERE / file).read_text()


def fixed_loop():
    """Seconds of this machine over those of the machine whose seconds are written down."""

    def once():
        started = time.process_time()
        sum(number * number for number in range(3_000_000))
        return time.process_time() - started

    return statistics.median(once() for _ in range(5)) / LOOP


class Meter:
    """Counts in a process that runs tests: processor seconds, launches, ranks."""

    def __init__(self):
        server = importlib.import_module("dualpipe_lab.launch.server")
        start, self.launches, self.ranks = server.start, 0, 0

        def counted(count, *args, **options):
            self.launches += 1
            self.ranks += count
            return start(count, *args, **options)

        server.start = counted
        self.before, self.clock = self.now(), time.perf_counter()

    def now(self):
        return sum(os.times()[:4]) + _server_seconds(), self.launches, self.ranks

    def since(self, in_browser):
        """Return what was spent since the last call."""
        now, before = self.now(), self.before
        clock, begun = time.perf_counter(), self.clock
        self.before, self.clock = now, clock
        seconds, *counts = (later - earlier for later, earlier in zip(now, before, strict=True))
        return (clock - begun if in_browser else seconds, *counts)


def _server_seconds():
    """Seconds of the fork server and of the ranks that it has seen ending."""
    from multiprocessing import forkserver

    pid = forkserver._forkserver._forkserver_pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Costs:
    """Plugin of pytest: counts where tests run; collects, prints, checks or writes where they are reported."""

    def __init__(self, config):
        self.wish = config.getoption("--costs")
        runs = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
        self.meter = Meter() if runs else None
        self.cases = defaultdict(list)
        self.speed = 1.0 if hasattr(config, "workerinput") else fixed_loop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cost", self.meter.since(_is_in_browser(item))))
        return report

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.cases[name_of(report.nodeid)].append(dict(report.user_properties)["cost"])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            return
        if self.wish in ("write", "cases"):
            self.write_cases()
        if self.wish == "write":
            self.write_budgets()
        self.lines, over = self.report()
        if over and self.wish == "check":
            self.lines.append(f"over budget: {', '.join(over)}; spend less, or raise the rows of tests/budgets.csv")
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("what the tests cost")
        terminalreporter.write("\n".join(self.lines) + "\n")

    def directories(self):
        """Seconds of the reference machine, launches and ranks, by directory."""
        table = defaultdict(lambda: [0.0, 0, 0])
        for name, spent in self.cases.items():
            for seconds, launches, ranks in spent:
                row = table[directory_of(name)]
                row[0] += seconds / self.speed
                row[1] += launches
                row[2] += ranks
        return {name: (round(row[0], 1), row[1], row[2]) for name, row in sorted(table.items())}

    def report(self):
        """Return the lines of the table, and the directories over their budgets."""
        budgets = {row["directory"]: row for row in _rows(BUDGETS)}
        lines, over = [f"processor seconds of the reference machine (this one takes {self.speed:.2f} as many)"], []
        found = self.directories()
        ratios = [
            found[name][0] / float(row["seconds"])
            for name, row in budgets.items()
            if name in found and float(row["seconds"]) >= LARGE
        ]
        pace = max(1.0, statistics.median(ratios or [1.0]))
        lines.append(
            f"{'directory':12}{'seconds':>9}{'budget':>8}{'launches':>10}{'budget':>8}{'ranks':>7}{'budget':>8}"
        )
        for name, spent in found.items():
            allowed = [float(budgets[name][key]) for key in ("seconds", "launches", "ranks")] if name in budgets else []
            shown = "".join(f"{a:>9.0f}{b:>9.0f}" for a, b in zip(spent, allowed or [0] * 3, strict=True))
            lines.append(f"{name:12}{shown}")
            pairs = zip(spent, allowed, (pace, 1, 1), strict=True) if allowed else ()
            if not allowed or any(a > OVER * b * times + 1 for a, b, times in pairs):
                over.append(name)
        return lines, over

    def write_cases(self):
        """Write what a case of each test took; those that did not run keep their seconds if they still exist."""
        means = {name: sum(one[0] for one in spent) / len(spent) / self.speed for name, spent in self.cases.items()}
        known = {name: seconds for name, seconds in _measured().items() if _exists(name)}
        kept = {name: mean for name, mean in {**known, **means}.items() if mean >= CHEAP}
        with MEASURED.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["test", "seconds"])
            table.writerows([name, f"{mean:.2f}"] for name, mean in sorted(kept.items()))

    def write_budgets(self):
        """Write what the directories took in this run."""
        with BUDGETS.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["directory", "seconds", "launches", "ranks"])
            table.writerows([name, *spent] for name, spent in self.directories().items())
