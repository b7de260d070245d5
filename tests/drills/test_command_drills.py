"""Drills of the command line: sizes and numbers that would take hours, or all memory, are refused in one line."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 60  # a command that is not refused takes hours; an import on a busy machine takes seconds

REFUSED = [
    ("explain gpipe --ranks 10000000", 1, "10000000 ranks x 8 microbatches is more than 131,072"),
    ("show 1f1b --microbatches 1000000000", 1, "4 ranks x 1000000000 microbatches is more than"),
    ("show interleaved --virtual-stages 100000", 1, "x 100000 --num-virtual-stages is more than 131,072"),
    ("compare gpipe interleaved:num_virtual_stages=100000", 1, "interleaved:num_virtual_stages=100000: 4 ranks x"),
    ("compare --ranks 100000 --microbatches 100000", 1, "is more than 131,072; choose a smaller size"),
    ("show gpipe --cost F=1e999999999", 1, "--cost: '1e999999999' in 'F=1e999999999' is not a number"),
    (f"show gpipe --cost F={'9' * 5000}", 1, "is not a number"),
    ("show endless.csv", 1, "endless.csv is no file of at most 20 MB"),
    ("show pipe.csv", 1, "pipe.csv is no file of at most 20 MB"),
    ("show large.csv", 1, "large.csv is no file of at most 20 MB"),
    ("show far.csv", 1, "the program is invalid"),
    ("grade . --at-once 1000", 2, "Invalid value for '--at-once'"),
    ("grade . --seconds nan", 2, "Invalid value for '--seconds'"),
    ("grade . --seconds inf", 2, "Invalid value for '--seconds'"),
]


@pytest.mark.parametrize(("words", "code", "message"), REFUSED, ids=[words[:40] for words, _, _ in REFUSED])
def test_a_size_beyond_all_use_is_refused_at_once(tmp_path, words, code, message):
    (tmp_path / "endless.csv").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.csv")
    with (tmp_path / "large.csv").open("wb") as file:
        file.truncate(20_000_001)
    (tmp_path / "far.csv").write_text("0F0,0B0,999999999F0,0F999999999\n")
    command = [sys.executable, "-m", "dualpipe_lab", *words.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    started = time.monotonic()
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert time.monotonic() - started < SECONDS
    assert (run.returncode, run.stdout) == (code, "")
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert message in run.stderr


def test_sizes_of_real_clusters_are_not_refused():
    from dualpipe_lab.cli.inputs import check_size, wanted

    for ranks, microbatches, name in ((16, 120, "dualpipe"), (64, 1024, "gpipe"), (16, 512, "interleaved")):
        check_size(ranks, microbatches, wanted(name))
