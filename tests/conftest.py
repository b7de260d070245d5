"""Settings of all tests, and fixtures for the built book: its pages, and a real browser that reaches nothing else."""

import functools
import http.server
import os
import threading
from contextlib import contextmanager
from pathlib import Path

import costs
import hypothesis
import pytest
import stand_in
from built_pages import HTML

# a busy machine is not a failure
hypothesis.settings.register_profile("every", deadline=None, max_examples=200)
hypothesis.settings.register_profile("course", deadline=None, max_examples=50)


def pytest_addoption(parser):
    parser.addoption("--every", action="store_true", help="run every case of every test")
    parser.addoption("--allowance", type=float, default=1, help="pay for so many times the usual cases of a test")
    wishes = ("print", "check", "write", "cases")
    parser.addoption("--costs", choices=wishes, help="what directories cost (tests/costs.py)")
    parser.addoption(
        "--stand-in",
        choices=("all", "drawn"),
        nargs="?",
        const="all",
        help="run launches on the stand-in for NCCL: of all tests, or of the first that launches in every third file",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "on_gloo(reason): not for NCCL, and not run through its stand-in")
    config.addinivalue_line("markers", "every: a case that runs with --every alone")
    hypothesis.settings.load_profile("every" if config.getoption("--every") else "course")
    if config.getoption("--costs"):
        config.pluginmanager.register(costs.Costs(config))
    if config.getoption("--stand-in"):
        stand_in.take_over()


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--every"):
        left = costs.drawn(items, config.getoption("--allowance"))
        kept = set(left)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = left
    if chosen := config.getoption("--stand-in"):
        for item in items:
            if found := item.get_closest_marker("on_gloo"):
                item.add_marker(pytest.mark.skip(reason=found.args[0]))
        if chosen == "drawn":
            drawn = stand_in.draw(items)
            config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
            items[:] = drawn
    costs.sort(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Share out files, those that wait as one piece: then one worker waits, and the others have the processors."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "waiting" if costs.waits(nodeid) else super()._split_scope(nodeid)

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def amount(pytestconfig):
    """How often a test repeats itself: `amount(20, 8)` is 20 with --every, else 8."""
    every = pytestconfig.getoption("--every")
    return lambda all_of_them, some: all_of_them if every else some


@pytest.fixture(scope="session")
def some(pytestconfig):
    """Some of a test's cases, a list or a table: `some(cases, 3)` are three, and all with --every."""
    every = pytestconfig.getoption("--every")
    return lambda cases, number: cases if every else costs.some(cases, number)


@pytest.fixture
def on_stand_in(monkeypatch):
    """Launches with backend="nccl" run on the stand-in; all others stay on GLOO."""
    monkeypatch.setenv(stand_in.ACCELERATOR, "stand_in")
    monkeypatch.delenv(stand_in.SUITE, raising=False)


CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # no name leads anywhere


def skip_or_fail(reason):
    """Browser tests are skipped where something is missing, except where they are required."""
    if os.environ.get("DUALPIPE_LAB_REQUIRE_BROWSER"):
        pytest.fail(f"{reason}, and DUALPIPE_LAB_REQUIRE_BROWSER is set", pytrace=False)
    pytest.skip(reason)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *args):
        """Say nothing."""


@contextmanager
def served(folder):
    """The address of a folder, served on loopback."""
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def site():
    """The address of the built book."""
    if not (HTML / "index.html").exists():
        skip_or_fail("the book is not built (make book)")
    with served(HTML) as address:
        yield address


@pytest.fixture(scope="session")
def serve():
    """What serves the pages that a test has built."""
    return served


@pytest.fixture(scope="session")
def browser():
    """Chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        skip_or_fail(f"there is no {CHROMIUM} (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=[*FLAGS, NO_NETWORK])
        yield chromium
        chromium.close()
