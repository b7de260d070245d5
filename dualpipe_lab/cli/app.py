"""The command-line application: its commands, and errors as one line without a traceback.

Chapter: book/appendix/command-line.  Exit codes: 0 success; 1 an impossible request; 2 a malformed request.
"""

import sys
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from dualpipe_lab._optional import MissingExtra
from dualpipe_lab.cli import commands
from dualpipe_lab.pp.validation.rules import InvalidProgram


class OneLine(TyperGroup):
    """A command group that prints each error as one line."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and exit with its code."""
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except typer.TyperException as error:
            sys.exit(_complain(error.format_message().replace("\n", " "), error.exit_code))
        except typer.Abort:
            sys.exit(_complain("interrupted", 130))
        except MissingExtra as missing:
            sys.exit(_complain(str(missing), 1))
        except InvalidProgram as error:
            more = len(error.problems) - 1
            first = error.problems[0].splitlines()[0] + (f" (and {more} more)" if more else "")
            sys.exit(_complain(f"the program is invalid: {first}; `explain` tells everything", 1))
        except OSError as error:
            sys.exit(_complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1))
        except ValueError as error:
            sys.exit(_complain(" ".join(str(error).splitlines()), 1))
        sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    if message:  # there is none where the help was asked for by giving no command
        print(f"error: {message}", file=sys.stderr)
    return code


app = typer.Typer(
    cls=OneLine,
    add_completion=False,
    no_args_is_help=True,
    help="DualPipe Lab: show, compare, explain, search pipeline schedules; plan a run; convert weights; merge "
    "traces. The course: lab, fresh, progress, grade.",
)
_PASSING = {"allow_extra_args": True, "ignore_unknown_options": True}  # the options of a schedule's builder
app.command(context_settings=_PASSING)(commands.show)
app.command(context_settings=_PASSING)(commands.compare)
app.command(context_settings=_PASSING)(commands.explain)
app.command()(commands.optimise)
app.command()(commands.convert)
app.command()(commands.traces)
app.command()(commands.plan)


def add_commands(app: typer.Typer) -> None:
    """Add what installed packages register under the entry point `dualpipe_lab.commands`, such as the course."""
    for point in sorted(entry_points(group="dualpipe_lab.commands"), key=lambda point: point.name):
        point.load()(app)


add_commands(app)


def main() -> None:
    """Run the command line."""
    app(prog_name="dualpipe-lab")
