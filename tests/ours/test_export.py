"""An exported trainer runs where this library is not installed."""

import os
import re
import subprocess
import sys

import pytest
from cli.shell import output

from dualpipe_course.own import export, finder, folder
from dualpipe_course.own.parts import PARTS


def test_it_holds_own_parts_and_the_course_s_and_imports_nothing_of_the_course(tmp_path):
    folder.make(tmp_path)
    mine = tmp_path / folder.NAME
    (mine / "ring.py").write_text(finder.official("ring").replace("from .", "from mine.") + "MINE = 1\n")
    assert export.export(mine, tmp_path / "out") == []  # not checked
    passed = {"text": folder._hash((mine / "ring.py").read_text()), "version": 1}
    (mine / folder.PASSED).write_text(f'{{"ring": {passed}}}'.replace("'", '"'))
    assert export.export(mine, tmp_path / "out") == ["ring"]
    assert "MINE = 1" in (tmp_path / "out" / "mine" / "ring.py").read_text()
    written = {path.name: path.read_text() for path in (tmp_path / "out").rglob("*.py")}
    assert set(written) > {f"{part}.py" for part in PARTS}
    assert not [name for name, text in written.items() if re.search(r"^ *(from|import) dualpipe_", text, re.MULTILINE)]
    assert "Mine are ring" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="holds something else"):
        export.export(None, tmp_path / "other")


def test_it_runs_where_the_library_is_not(tmp_path):
    """`-I` and a blocked import stand for an environment with torch and pytest alone."""
    assert "0 parts are yours" in output("export", "mine", str(tmp_path / "out"), "--to", str(tmp_path / "none"))
    block = tmp_path / "block"
    block.mkdir()
    (block / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(dict.fromkeys(('dualpipe_lab', 'dualpipe_course', 'dualpipe_ours')))\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "test_mine.py",
        "-k",
        "rows or dense or together",
    ]
    environment = {**os.environ, "PYTHONPATH": str(block)}
    done = subprocess.run(
        command, cwd=tmp_path / "out", capture_output=True, text=True, env=environment, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "7 passed" in done.stdout
