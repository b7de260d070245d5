"""The page about the command line shows what the commands print, to the letter."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dualpipe_lab.cli.app import app

PAGE = Path(__file__).parents[2] / "book" / "appendix" / "command-line.md"
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def transcript(block):
    """What a terminal shows after the commands of a block."""
    lines = []
    for command in [line for line in block.splitlines() if line.startswith("$ ")]:
        words = shlex.split(command)[4:]
        result = CliRunner(env={"COLUMNS": "80"}).invoke(app, words)
        assert result.exit_code == 0
        lines += [command, *(line.rstrip() for line in result.output.splitlines())]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][2:])
def test_the_page_shows_what_the_command_prints(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert block == transcript(block)


def test_every_option_of_the_page_exists():
    text = PAGE.read_text(encoding="utf-8")
    known = {
        word
        for name in ("show", "compare", "plan", "convert")
        for word in re.findall(r"--[a-z]+", CliRunner().invoke(app, [name, "--help"]).output)
    }
    assert set(re.findall(r"--[a-z]+", text.replace("--virtual-stages", ""))) <= known
