"""Running the command line in this process, and reading its tables."""

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
    lines = [line.split() for line in text.splitlines()[2:] if line[:1] in " -123456789"]
    return {line[1]: line[2:] for line in lines}
