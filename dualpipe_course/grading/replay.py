"""Replay: run a submitted notebook from a clean kernel by nbval, and compare what its cells show with what is stored.

In: a notebook, a scratch folder, limits.  Out: one `Replayed`.
The notebook runs as it was handed in, so its own cells decide what is compared: the result says whether the notebook
does what it shows, and not whether an answer is right.  pytest and the kernel are children of the sandbox, which ends
them at a limit, with all that they started.
"""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dualpipe_course.grading.limits import Limits, Stopped

SANITIZE = Path(__file__).parents[1] / "sanitize.cfg"
STARTUP_SECONDS = 60.0  # pytest and a kernel, maybe on a busy machine
MAX_REPORT_BYTES = 32 * 2**20
ENDING_SECONDS = 30.0  # from pytest's last line to its end
LOOK_SECONDS = 0.05
_EXIT_CODES = {"same": 0, "differs": 1, "no outputs": 5}  # pytest's; the two others come with any
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Replayed:
    """What nbval found: status is same, differs, no outputs, stopped or unreadable."""

    status: str
    message: str = ""
    seconds: float = 0.0


def replay(
    notebook: str, folder: Path, limits: Limits, seconds: float, look: Callable[[], None], prepare: Callable[[], None]
) -> Replayed:
    """Run the text of a notebook in an empty folder under limits; `look` raises Stopped, `prepare` runs in the child.

    The caller ends what the notebook leaves running.
    """
    folders = {name: folder / name for name in ("work", "home", "tmp")}
    for each in folders.values():
        each.mkdir(parents=True)
    path, report = folders["work"] / "notebook.ipynb", folder / "report.xml"
    path.write_text(notebook, encoding="utf-8")
    started = time.monotonic()
    with subprocess.Popen(  # noqa: S603
        _command(path, report, limits.seconds),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(folders),
        cwd=folders["work"],
        start_new_session=True,
        preexec_fn=prepare,
    ) as process:
        try:
            printed = _watch(process, limits, STARTUP_SECONDS + seconds, look)
            code = process.wait(ENDING_SECONDS)
        except (Stopped, subprocess.TimeoutExpired) as error:
            found = Replayed("stopped", str(error))
        else:
            found = _read(report, printed, limits.seconds)
            if code != _EXIT_CODES.get(found.status, code):
                found = Replayed(
                    "stopped", f"pytest was ended from inside, exit code {code}; its report said {found.status}"
                )
        finally:
            process.kill()
    return Replayed(found.status, found.message, round(time.monotonic() - started, 2))


def shows_nothing(notebook: dict[str, Any]) -> bool:
    """Whether no cell of a notebook has a stored output: there is nothing to compare."""
    return not any(cell.get("outputs") for cell in notebook.get("cells", []))


def _command(path: Path, report: Path, cell_seconds: float) -> list[str]:
    options = ["-q", "-o", "addopts=", "-o", "junit_logging=no", "-p", "no:cacheprovider", f"--rootdir={path.parent}"]
    options += ["--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZE}"]
    options += [f"--nbval-cell-timeout={cell_seconds}", f"--junitxml={report}", "-o", "junit_duration_report=call"]
    return [sys.executable, "-P", "-m", "pytest", *options, str(path)]


def _environment(folders: dict[str, Path]) -> dict[str, str]:
    """Return this environment with the scratch folders as home and temporary directory, also for Jupyter's files."""
    home = str(folders["home"])
    own = {"HOME": home, "TMPDIR": str(folders["tmp"]), "XDG_CACHE_HOME": home, "PYTEST_ADDOPTS": ""}
    own["JUPYTER_DEFAULT_PROVISIONER_NAME"] = "local-provisioner"  # a new process, whatever this environment says
    own |= {f"JUPYTER_{name}_DIR": f"{home}/{name.lower()}" for name in ("CONFIG", "DATA", "RUNTIME")}
    return os.environ | own | {"IPYTHONDIR": f"{home}/ipython"}


def _watch(process: "subprocess.Popen[bytes]", limits: Limits, seconds: float, look: Callable[[], None]) -> str:
    """Read what pytest prints until it ends; Stopped beyond a limit."""
    assert process.stdout is not None
    deadline, printed = time.monotonic() + seconds, b""
    while True:
        readable, _, _ = select.select([process.stdout], [], [], LOOK_SECONDS)
        data = os.read(process.stdout.fileno(), 1 << 16) if readable else b""
        printed += data
        if len(printed) > limits.output_bytes:
            raise Stopped(f"nbval printed more than {limits.output_bytes:,} bytes")
        if (readable and not data) or process.poll() is not None:
            return printed.decode(errors="replace")
        if time.monotonic() > deadline:
            raise Stopped(f"the notebook took more than {seconds:g} s; is there a loop that never ends?")
        look()


def _read(report: Path, printed: str, cell_seconds: float) -> Replayed:
    """Read nbval's report: one test case per cell.  How it words a cell that was stopped depends on how that ended."""
    try:
        if report.stat().st_size > MAX_REPORT_BYTES:
            return Replayed("stopped", "its report is too long to read")
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 - of bounded size
    except (OSError, ElementTree.ParseError):
        return Replayed("unreadable", f"nbval gave no report: {_plain(printed)[-1000:].strip()}")
    found = [(case, node) for case in cases for node in case if node.tag in ("failure", "error")]
    if not cases or not found:
        return Replayed("same" if cases else "no outputs", "" if cases else "nbval found no cell to compare")
    failures = f"{len(found)} of {len(cases)} cells; the first: {_plain(found[0][1].text or '')[:2000].strip()}"
    if any(float(case.get("time", 0.0)) >= cell_seconds for case, _ in found):
        return Replayed("stopped", f"a cell took more than {cell_seconds:g} s; is there an endless loop? {failures}")
    stopped = any("Timeout of" in (node.text or "") for _, node in found)  # for what a cell prints late
    return Replayed("stopped" if stopped else "differs", failures)


def _plain(text: str) -> str:
    return _COLOUR.sub("", text.replace("#x1B", "\x1b"))
