"""The commands that the course adds: `dualpipe-lab grade`, `graft`, `progress`, `lab`, `fresh` and `export`."""

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dualpipe_course import record
from dualpipe_course.grading.limits import Limits
from dualpipe_lab._optional import extra

MAX_SECONDS = 86_400
COURSE = Path(__file__).parents[1]
EXERCISES = COURSE / "exercises"
FOLDER = "my-course"
START = "start.md"
FromCourse = Annotated[Path, typer.Option("--course", help="a checkout of the course: where the notebooks are")]
ToFolder = Annotated[Path | None, typer.Option("--to", help="your folder; without it my-course, beside the book")]


def grade(
    folder: Annotated[Path, typer.Argument(help="submissions: folder/<learner>/<notebook>.ipynb, or flat files")],
    out: Annotated[Path, typer.Option(help="where the tables and the single results go")] = Path("grades"),
    exercises: Annotated[Path, typer.Option(help="the pristine exercise notebooks")] = EXERCISES,
    fresh: Annotated[bool, typer.Option(help="grade again what is graded already")] = False,
    at_once: Annotated[int, typer.Option(min=1, max=16, help="submissions graded at the same time")] = 2,
    seconds: Annotated[float, typer.Option(min=1, max=MAX_SECONDS, help="time limit of one exercise")] = Limits.seconds,
    memory: Annotated[int, typer.Option(min=256, help="memory limit of one exercise, MiB")] = Limits.memory_mib,
    nbval: Annotated[bool, typer.Option("--nbval", help="run each notebook, compare its outputs")] = False,
) -> None:
    """Grade every notebook in FOLDER; print a table, write CSV and HTML."""
    from dualpipe_course.grading import report, submissions
    from dualpipe_course.grading.grader import Graded, Grader

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack the letters of a name
        sys.stdout.reconfigure(errors="backslashreplace")
    if nbval:
        with extra("grading", "--nbval"):
            import nbval as _nbval  # noqa: F401
    console = Console()
    started = time.monotonic()
    found = submissions.find(folder, submissions.exercises(exercises), out)
    done: list[Graded] = []

    def write() -> None:
        report.write_csv(done, out / "grades.csv")
        report.write_gradebook(done, out / "gradebook.csv")
        report.write_html(done, out / "grades.html")

    def note(graded: Graded) -> None:
        done.append(graded)
        write()  # a table is there whatever ends this process
        line = f"{len(done):3} of {len(found)}  {report.plain(graded.learner)}  {graded.notebook or '-'}  "
        console.print(f"{line}{graded.points:g} / {graded.out_of}  {graded.seconds:g} s", markup=False, highlight=False)

    grader = Grader(out, replace(Limits(), seconds=seconds, memory_mib=memory), fresh, nbval)

    def run() -> None:
        with grader:
            done[:] = grader.grade(found, at_once, note)

    stopped = _reason_to_stop(run)
    write()
    console.print(report.screen(done))
    console.print(
        f"{len(done)} submissions in {time.monotonic() - started:.0f} s: grades.html and .csv, gradebook.csv in {out}"
    )
    if stopped and len(done) < len(found):
        stopped += f"; {len(done)} of {len(found)} submissions are in the table, run the same command for the others"
    if problems := [*grader.warnings, *[stopped] * bool(stopped)]:
        raise ValueError("\n".join(problems))


def graft(
    folder: Annotated[Path, typer.Argument(help="submissions: folder/<learner>/<notebook>.ipynb, or flat files")],
    out: Annotated[Path, typer.Option(help="where the notebooks go")] = Path("grafted"),
    course: FromCourse = COURSE,
) -> None:
    """Put the answers in FOLDER into the course's own notebooks: `pytest --nbval` of these is the mark."""
    with extra("grading", "grafting"):
        from dualpipe_course.grading.graft import graft as write

    unreadable = write(folder, out, course)
    print("\n".join([*unreadable, f"==> {len(list(out.glob('*.ipynb')))} notebooks; mark them: pytest --nbval {out}"]))


def _reason_to_stop(run: Callable[[], None]) -> str:
    """Run; return why it ended early, or an empty string.  SIGTERM ends it as Ctrl-C does: nothing stays behind."""
    from dualpipe_course.grading.grader import GradingStopped

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run()
    except (GradingStopped, MemoryError) as error:
        return str(error) or "out of memory"
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        signal.signal(signal.SIGTERM, before)
    return ""


def progress() -> None:
    """Show which exercises are solved in the notebooks of this folder, or else in those that `lab` made."""
    from dualpipe_course.check import progress as page

    if not record.path().exists() and record.path(COURSE / FOLDER).exists():
        os.chdir(COURSE / FOLDER)
    print(page())


def lab(
    context: typer.Context,
    to: ToFolder = None,
    course: FromCourse = COURSE,
    copies_only: Annotated[bool, typer.Option("--copies-only", help="make the copies, start nothing")] = False,
) -> None:
    """Make or renew your copies of the notebooks, and open JupyterLab on them.

    Other options, such as --no-browser or --port=8890, go to JupyterLab.
    """
    from dualpipe_course.workspace import lab as jupyterlab
    from dualpipe_course.workspace.renew import renew

    folder = to or course / FOLDER
    if address := jupyterlab.running(folder):
        print(f"JupyterLab runs on {folder} already: {address}\nEnd it before the copies can be renewed.")
        return
    try:
        report = renew(course, folder, jupyterlab.trust)
    except OSError as error:
        if not (folder / START).is_file():
            raise ValueError(f"{folder} cannot be written ({error.strerror}); name another: --to FOLDER") from None
        print(f"{folder} cannot be written ({error.strerror}): nothing is renewed", file=sys.stderr)
    else:
        pages = f"{report.num_copies} pages in {folder}, {report.num_shown} of them with results"
        print("\n".join([*report.lines, f"==> {pages}"]), flush=True)
    if not copies_only:
        jupyterlab.start(folder, context.args)


def fresh(
    chapter: Annotated[str, typer.Argument(help="a copy, such as gpipe, or gpipe-exercises")],
    to: ToFolder = None,
    course: FromCourse = COURSE,
) -> None:
    """Give a chapter out again, as the course has it now; what you had is kept in `old`."""
    from dualpipe_course.workspace import lab as jupyterlab
    from dualpipe_course.workspace.renew import fresh as again

    print("\n".join(again(course, to or course / FOLDER, chapter, jupyterlab.trust).lines))


def export(
    what: Annotated[str, typer.Argument(help="mine: your own trainer")],
    folder: Annotated[Path, typer.Argument(help="where the repository goes")],
    to: ToFolder = None,
    course: FromCourse = COURSE,
) -> None:
    """Write your trainer as a repository that needs torch alone: parts, messages, runs for torchrun, tests."""
    from dualpipe_course.own.export import export as write
    from dualpipe_course.own.folder import NAME

    if what != NAME:
        raise ValueError(f"{what} cannot be exported; use `dualpipe-lab export {NAME} FOLDER`")
    mine = (to or course / FOLDER) / NAME
    own = write(mine if mine.is_dir() else None, folder)
    print(f"==> {folder}: {len(own)} parts are yours{': ' * bool(own)}{', '.join(own)}; README.md says what to run")


def register(app: typer.Typer) -> None:
    """Add the course's commands; the entry point `dualpipe_lab.commands` names this function."""
    app.command()(grade)
    app.command()(graft)
    app.command()(progress)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(lab)
    app.command()(fresh)
    app.command()(export)
