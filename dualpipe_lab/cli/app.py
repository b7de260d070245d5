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
        code, message = 1, ""
        try:
            result = super().main(*args, **{**extra, "standalone_mode": False})
            code = result if isinstance(result, int) else 0
        except typer.TyperException as error:
            code, message = error.exit_code, error.format_message()  # none where no command asks for the help
        except typer.Abort:
            code, message = 130, "interrupted"
        except InvalidProgram as error:
            more = len(error.problems) - 1
            first = error.problems[0].splitlines()[0] + (f" (and {more} more)" if more else "")
            message = f"the program is invalid: {first}; `explain` tells everything"
        except OSError as error:
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except (ValueError, MissingExtra) as error:
            message = str(error)
        if message:
            print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
        sys.exit(code)


app = typer.Typer(
    cls=OneLine,
    add_completion=False,
    no_args_is_help=True,
    help="DualPipe Lab: show, compare, explain pipeline schedules; plan a run; convert weights. The course: lab, "
    "fresh, progress, grade.",
)
for passing in (commands.show, commands.compare, commands.explain):  # unknown options are those of a builder
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(passing)
for command in (commands.convert, commands.plan):
    app.command()(command)


def add_commands(app: typer.Typer) -> None:
    """Add what installed packages register under the entry point `dualpipe_lab.commands`, such as the course."""
    for point in sorted(entry_points(group="dualpipe_lab.commands"), key=lambda point: point.name):
        point.load()(app)


add_commands(app)


def main() -> None:
    """Run the command line."""
    app(prog_name="dualpipe-lab")
