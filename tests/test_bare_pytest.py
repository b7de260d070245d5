"""Commands as people type them: `pytest --nbval` on solutions, and a test that never ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = "solutions/cp/softmax"
GRADER = ["-p", "no:xdist", "-p", "no:xdist.looponfail", "-p", "no:hypothesispytest", "-p", "no:timeout"]
SAYS_OPTIONS = """
def pytest_collection_finish(session):
    option = session.config.option
    print(f"sanitised with {option.nbval_sanitize_with}, {option.nbval_cell_timeout} s a cell")
"""


def bare(*arguments, folder=ROOT, **environment):
    path = os.pathsep.join([str(ROOT), environment.pop("path", "")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("folder", "arguments"),
    [
        (ROOT, ["--nbval", f"{SMALL}/"]),
        (ROOT / SMALL, ["--nbval-lax", *GRADER]),
        (ROOT / "solutions", ["--nbval", SMALL.removeprefix("solutions/") + "/softmax.ipynb"]),
    ],
)
def test_nbval_runs_solutions_as_graders_type_it(tmp_path, folder, arguments):
    (tmp_path / "says_options.py").write_text(SAYS_OPTIONS)
    done = bare(*arguments, "-s", "-p", "says_options", folder=folder, path=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"sanitised with {ROOT / 'dualpipe_course' / 'sanitize.cfg'}, 120 s a cell" in done.stdout
    assert " passed" in done.stdout


def test_nbval_collects_every_solution_and_no_answer():
    done = bare("--nbval", "solutions/", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    notebooks = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert notebooks == {str(path.relative_to(ROOT)) for path in (ROOT / "solutions").rglob("*.ipynb")}


def test_a_test_that_never_ends_is_told_by_name(tmp_path, pytestconfig):
    """The limit of all tests is the one of the file in which they are configured; here it is shorter.

    It sleeps: a signal that interrupts a bare loop may find it between two lines, which Python 3.11 cannot number.
    """
    assert pytestconfig.option.timeout >= 300
    file = tmp_path / "test_endless.py"
    file.write_text(
        "import time\n\n\ndef wait_forever():\n    time.sleep(600)\n\n\ndef test_v_min():\n    wait_forever()\n"
    )
    settings = ["-c", str(ROOT / "pyproject.toml"), "-p", "conftest"]
    done = bare(*settings, "--timeout=3", str(file), folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert "test_v_min" in done.stdout
    assert "wait_forever" in done.stdout
    assert "Timeout (>3.0s)" in done.stdout
