"""What is drawn is drawn again, in its order, and --every takes all."""

import draws

pytest_plugins = ["pytester"]
CONFTEST = """
import draws
def pytest_addoption(parser):
    parser.addoption("--every", action="store_true")
def pytest_configure(config):
    config.addinivalue_line("markers", "drawn(number)")
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--every"):
        items[:] = draws.drawn(items)
"""
TESTS = """
import pytest
@pytest.mark.drawn(3)
@pytest.mark.parametrize("number", range(10))
def test_many(number): print("many", number)
@pytest.mark.drawn(3)
@pytest.mark.parametrize("number", range(2))
def test_few(number): print("few", number)
def test_one(): print("one")
"""


def test_a_marked_test_runs_some_cases_and_the_others_all(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    pytester.syspathinsert(draws.__file__.rpartition("/")[0])
    first, again, every = (pytester.runpytest("-s", "-q", "-p", "no:xdist", *more) for more in ((), (), ("--every",)))
    first.assert_outcomes(passed=6)
    every.assert_outcomes(passed=13)
    said = [line for line in first.outlines if line.startswith(("many", "few", "one", "."))]
    assert said == [line for line in again.outlines if line.startswith(("many", "few", "one", "."))]


def test_some_of_a_list_or_table_keep_their_order():
    assert draws.some([1, 2, 3], 5) == [1, 2, 3]
    chosen = draws.some(list(range(20)), 6)
    assert chosen == sorted(chosen) == draws.some(list(range(20)), 6)
    assert len(set(chosen)) == 6
    table = draws.some({name: name for name in "abcdef"}, 2)
    assert list(table) == sorted(table)
    assert len(table) == 2
