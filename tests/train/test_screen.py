"""The progress bar in a terminal, a narrow one and a pipe; metrics in a CSV file."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from dualpipe_lab.train.metrics import Metrics, MetricsFile, read_csv

ROOT = Path(__file__).parents[2]
SCRIPT = """
import time
from dualpipe_lab.train.metrics import Metrics
from dualpipe_lab.train.screen import Screen

with Screen(num_steps=30, log_every=10) as screen:
    for step in range(1, 31):
        evaluation = 4.5 if step == 7 else None
        screen.show(Metrics(step, 5 / step, 1.0, 1e-3, 1e4, 0.25, (2048,), (10**8,), evaluation=evaluation))
        time.sleep(0.02)
print("the end")
"""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEPS = ["1", "7", "10", "20", "30"]


def in_terminal(columns):
    """What a script writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "TERM")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 65536):
                said += part
        except OSError:
            pass  # Linux says so that the other end is closed
        assert process.wait(timeout=60) == 0, said.decode()
    os.close(ours)
    return said.decode()


@pytest.mark.parametrize("columns", [100, 30])
def test_a_terminal_has_one_line_of_progress_and_whole_rows(columns):
    said = in_terminal(columns)
    lines = [CONTROL.sub("", line).rstrip() for line in re.split(r"[\r\n]+", said)]
    bars = [line for line in lines if re.search(r"\d+/30", line)]
    assert len(bars) > 5, said
    assert max(map(len, bars)) <= columns, "a line that wraps cannot be drawn over"
    assert said.count("\x1b[1A") == 1, "the cursor goes up once, to remove the last bar: a bar is one line"
    assert re.findall(r"step (\d+)  loss \d.*peak 100 MB", CONTROL.sub("", said)) == STEPS
    assert said.count("\x1b[?25h") == 1, "the cursor is back"
    assert CONTROL.sub("", said).rstrip().endswith("the end")


def test_a_pipe_gets_plain_lines():
    command = [sys.executable, "-c", SCRIPT]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    *lines, last = done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == STEPS
    assert last == "the end"
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout


def row(step):
    return Metrics(step, 1 / step, None, 1e-3, 10.0, 0.5, (1, 2), (3, 4))


def test_a_file_that_a_kill_cut_short_is_continued_without_double_rows(tmp_path):
    file = tmp_path / "deep" / "rows.csv"
    written = MetricsFile(file)
    for step in range(1, 13):
        written.write(row(step))
    file.write_text(file.read_text().rpartition("2,0.08")[0])  # the row of step 12 ends behind its first digit
    assert file.read_text().endswith("\n1")
    MetricsFile(file, first=12).write(row(12))
    read = read_csv(file)
    assert [each["step"] for each in read] == [str(step) for step in range(1, 13)]
    assert [float(each["loss"]) for each in read] == [1 / step for step in range(1, 13)]
    assert read[0]["sent_bytes"] == "2"
    assert file.read_text().startswith("step,loss,norm,lr,")
    assert os.listdir(file.parent) == ["rows.csv"]


def test_a_kill_while_the_rows_are_written_anew_loses_none(tmp_path, monkeypatch):
    file = tmp_path / "rows.csv"
    MetricsFile(file).write(row(1))
    before = file.read_text()

    def die(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(file, first=2)
    assert file.read_text() == before
