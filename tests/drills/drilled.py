"""What drills share: a script in a process of its own, and a look at whatever it leaves on the machine."""

import os
import secrets
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PATIENCE = 120  # seconds; a drill takes a few where nothing else runs
MARK = "DUALPIPE_LAB_DRILL"
HEAD = """
import os, signal, sys, time, threading, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a shell
import dualpipe_lab as lab
from dualpipe_lab import comm
"""


@dataclass
class Drill:
    """One script, marked in its environment, with a folder for temporary files of its own."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    def start(self, body, **options):
        """Start the script; what `launch` is given has to be defined in it."""
        script = self.folder / "drill.py"
        script.write_text(HEAD + textwrap.dedent(body))
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = os.environ | {"TMPDIR": str(temporary), MARK: self.mark} | self.environment
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        return subprocess.Popen([sys.executable, str(script)], env=environment, cwd=self.folder, **pipes)

    def run(self, body, **options):
        """Run the script to its end; return its exit code, output and errors."""
        with self.start(body, **options) as process:
            out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def left(self):
        """Marked processes that are still alive, and files in the temporary folder, once there has been time to go."""
        deadline = time.monotonic() + PATIENCE / 2
        while (found := [*self._processes(), *self._files()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _processes(self):
        return [process.info["pid"] for process in psutil.process_iter(["pid"]) if self._is_marked(process)]

    def _is_marked(self, process):
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except psutil.Error:
            return False

    def _files(self):
        return [path.name for path in (self.folder / "tmp").iterdir() if path.name.startswith("dualpipe-lab-")]
