"""How many cases of a test run by default, in which order, and what is printed of what they cost."""

import costs
import pytest

pytest_plugins = ["pytester"]
CONFTEST = f"""
import pathlib, sys
sys.path.insert(0, {costs.__file__.rpartition("/")[0]!r})
import costs
costs.MEASURED, costs.BUDGETS = pathlib.Path("measured.csv"), pathlib.Path("budgets.csv")
def pytest_addoption(parser):
    parser.addoption("--every", action="store_true")
    parser.addoption("--costs")
    parser.addoption("--allowance", type=float, default=1)
def pytest_configure(config):
    if config.getoption("--costs"):
        config.pluginmanager.register(costs.Costs(config))
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--every"):
        items[:] = costs.drawn(items, config.getoption("--allowance"))
    costs.sort(items)
"""
CHEAP = """
import pytest
@pytest.mark.parametrize("number", range(10))
def test_unknown(number): print("unknown", number)
"""
DEAR = """
import pytest
@pytest.mark.parametrize("number", range(10))
def test_dear(number): print("dear", number)
@pytest.mark.parametrize("number", range(10))
def test_dearest(number): print("dearest", number)
def test_launch():
    import dualpipe_lab
    dualpipe_lab.launch(max, 2)
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # seconds of each run
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_a=CHEAP, test_b=DEAR)
    pytester.path.joinpath("measured.csv").write_text(
        "test,seconds\ntest_b.py::test_dear,1.0\ntest_b.py::test_dearest,9\n"
    )
    return lambda *options: pytester.runpytest_subprocess("-s", "-q", *options)


def said(result):
    return [line.strip(".") for line in result.outlines if line.strip(".").startswith(("unknown", "dear"))]


def test_cases_run_until_the_allowance_is_spent_and_long_files_first(suite):
    first = said(suite())
    assert [line.split()[0] for line in first] == ["dear"] * 3 + ["dearest"] + ["unknown"] * 10
    assert said(suite()) == first
    suite("--every").assert_outcomes(passed=31)
    assert [line.split()[0] for line in said(suite("--allowance=4"))] == ["dear"] * 10 + ["dearest"] + ["unknown"] * 10


def test_a_directory_over_its_budget_fails_the_run(suite, pytester):
    suite("--costs=write").assert_outcomes(passed=15)
    header, row = pytester.path.joinpath("budgets.csv").read_text().splitlines()
    directory, _, launches, ranks = row.split(",")
    assert (directory, launches, ranks) == (".", "1", "2")
    assert suite("--costs=check").ret == 0
    pytester.path.joinpath("budgets.csv").write_text(f"{header}\n.,0,0,0\n")
    over = suite("--costs=check")
    assert over.ret == 1
    over.stdout.fnmatch_lines(["over budget by more than a fifth: .; see tests/costs.py"])


def test_some_of_a_list_or_table_keep_their_order():
    assert costs.some([1, 2, 3], 5) == [1, 2, 3]
    chosen = costs.some(list(range(20)), 6)
    assert chosen == sorted(chosen) == costs.some(list(range(20)), 6)
    assert len(set(chosen)) == 6
    table = costs.some({name: name for name in "abcdef"}, 2)
    assert list(table) == sorted(table)
    assert len(table) == 2
