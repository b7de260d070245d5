"""How many cases of a test run by default, in which order, and what is printed of what they cost."""

from types import SimpleNamespace

import costs
import pytest

pytest_plugins = ["pytester"]
CONFTEST = f"""
import pathlib, sys
sys.path.insert(0, {costs.__file__.rpartition("/")[0]!r})
import costs
costs.MEASURED, costs.BUDGETS = pathlib.Path("measured.csv"), pathlib.Path("budgets.csv")
def pytest_addoption(parser):
    parser.addoption("--costs")
def pytest_configure(config):
    config.pluginmanager.register(costs.Costs(config))
"""
LAUNCH = """
def test_launch():
    import dualpipe_lab
    dualpipe_lab.launch(max, 2)
"""


class Item:
    """As much of a collected test as is asked for."""

    def __init__(self, name, number, *markers):
        self.nodeid, self.path, self.markers = f"tests/{name}[{number}]", name.partition("::")[0], markers

    def get_closest_marker(self, name):
        return name if name in self.markers else None


def test_cases_run_until_the_allowance_is_spent_and_long_files_first(monkeypatch):
    monkeypatch.setattr(costs, "_measured", lambda: {"test_b.py::test_dear": 1.0, "test_b.py::test_dearest": 9.0})
    names = ("test_a.py::test_unknown", "test_b.py::test_dear", "test_b.py::test_dearest")
    items = [Item(name, number) for name in names for number in range(10)] + [Item(names[1], 10, "every")]

    def number_of_each(times=1):
        found = costs.drawn(items, times)
        assert found == costs.drawn(items, times) == [one for one in items if one in found]
        return [sum(costs.name_of(one.nodeid) == name for one in found) for name in names]

    assert number_of_each() == [10, 3, 1]
    assert number_of_each(4) == [10, 10, 1]
    items.append(Item("launch/test_kernel.py::test_a_cell", 0))  # which waits
    costs.sort(items)
    assert [one.path for one in items] == ["launch/test_kernel.py"] + ["test_b.py"] * 21 + ["test_a.py"] * 10


def test_what_a_directory_costs_is_written_and_over_its_budget_fails_the_run(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # seconds
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(LAUNCH)
    pytester.runpytest_subprocess("-q", "--costs=write").assert_outcomes(passed=1)
    header, row = pytester.path.joinpath("budgets.csv").read_text().splitlines()
    directory, _, launches, ranks = row.split(",")
    assert (directory, launches, ranks) == (".", "1", "2")
    monkeypatch.setattr(costs, "BUDGETS", pytester.path / "budgets.csv")
    checking = object.__new__(costs.Costs)
    checking.wish, checking.cases, checking.speed = "check", {"test_a.py::test_launch": [(0.1, 1, 2)]}, 1.0
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=0)
    checking.pytest_sessionfinish(session)
    assert session.exitstatus == 0
    costs.BUDGETS.write_text(f"{header}\n.,0,0,0\n")
    checking.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert checking.lines[-1] == "over budget: .; spend less, or raise the rows of tests/budgets.csv"


def test_a_slow_machine_is_not_over_its_budgets_and_a_directory_that_stands_out_is(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "BUDGETS", tmp_path / "budgets.csv")
    rows = "".join(f"{name},30,4,8\n" for name in "abc")
    costs.BUDGETS.write_text(f"directory,seconds,launches,ranks\n{rows}")
    checking = object.__new__(costs.Costs)
    checking.speed = 1.0

    def over(**seconds):
        checking.cases = {f"{name}/test_x.py::test": [(spent, 4, 8)] for name, spent in seconds.items()}
        return checking.report()[1]

    assert over(a=60, b=61, c=60) == []  # twice as slow everywhere
    assert over(a=60, b=80, c=60) == ["b"]
    assert over(a=10, b=30, c=40) == ["c"]  # a quick machine makes no budget smaller


def test_some_of_a_list_or_table_keep_their_order():
    assert costs.some([1, 2, 3], 5) == [1, 2, 3]
    chosen = costs.some(list(range(20)), 6)
    assert chosen == sorted(chosen) == costs.some(list(range(20)), 6)
    assert len(set(chosen)) == 6
    table = costs.some({name: name for name in "abcdef"}, 2)
    assert list(table) == sorted(table)
    assert len(table) == 2
