"""Running the command line in this process, and reading its tables."""

import re

from typer.testing import CliRunner

from dualpipe_lab.cli.app import app


def run(*words, columns=100):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(map(str, words)))


def output(*words, **options):
    result = run(*words, **options)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def table(text):
    """The rows of compare's table: schedule -> numbers."""
    rows = re.findall(r"^ ?(?:\d+|-)  (\S+(?: \S+)*)  +(.*)$", text, re.MULTILINE)
    return {name: numbers.split() for name, numbers in rows}
