"""Make the exercises from the solutions: solutions/<part>/<topic>/<topic>.md -> exercises/<part>/<topic>.md and .ipynb.

The answer cells of the trainer's parts are its official files, too: dualpipe_ours/<part>.py.

A solution stands between two comments, at any indentation.  Its lines become one that raises NotImplementedError, or
the commented lines after a third marker, where the learner is to repair something:

    ### BEGIN SOLUTION          ### BEGIN SOLUTION
    return 2 * x                return 2 * x
    ### END SOLUTION            ### STUB
                                # return 3 * x
                                ### END SOLUTION

A cell with a solution carries a tag such as answer-gpipe-1, and a later cell the tag check-gpipe-1.
An exercise starts with the cell that installs the course on Colab, as the pages of the book do (install_cell.py), and
ends with the ways back to its chapter and to the exercises before and after it, in reading order.
Title, kind, minutes and number of an exercise stand in its check (dualpipe_course) alone: they are written into the
solution's headings and first sentences from there.
Usage: make_exercises.py            write the exercises
       make_exercises.py --check    exit 1 with the first cell that differs; nothing is written
       make_exercises.py --run [NAME ...]   execute solutions and store their outputs in solutions/**.ipynb
"""

import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import install_cell
import jupytext
import nbformat
import yaml

sys.path.insert(0, str(Path.cwd()))  # the checks of this checkout
from dualpipe_course.own.part import Part
from dualpipe_course.registry import TOPICS, all_checks
from dualpipe_course.registry import topic as checks_of
from dualpipe_course.solved import without_marks
from dualpipe_course.workspace.contents import CONTENTS, chapter_of, in_reading_order

BEGIN, STUB, END = "### BEGIN SOLUTION", "### STUB", "### END SOLUTION"
TODO = 'raise NotImplementedError("your code")'
REMEDY = "remedy: edit solutions/**.md only, then run `make exercises`"
FORMS = (".md", ".ipynb")
PART_OF = {check.name: check.part for check in all_checks() if isinstance(check, Part)}
NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


class Refused(ValueError):  # noqa: N818
    """A solution that cannot become an exercise."""


class Cell(NamedTuple):
    """One cell as far as the files must agree."""

    kind: str
    text: str
    tags: tuple[str, ...]


def with_facts(text: str) -> str:
    """Return a solution page whose headings, kinds and minutes are those of its checks."""
    topic = re.search(r"answer-(\w+)-\d+\b", text)
    if topic is None or topic[1] not in TOPICS:
        return text
    checks = [check.about for check in checks_of(topic[1])]
    for about in checks:
        number = about.name.rpartition("-")[2]  # of one that is retired there is none
        part = PART_OF.get(about.name)
        start = f"## Part `{part}`: " if part else f"## {number}. "
        heading = f"{start}{about.title}"
        length = f"*{about.kind.capitalize()}, {about.minutes} minutes.{' On the trail.' * about.trail}*"
        old = rf"^{re.escape(start)}.*(\n\n)\*[A-Z][a-z ]+, \d+ minutes\.(?: On the trail\.)?\*"
        text = re.sub(old, f"{heading}\n\n{length}".replace("\\", r"\\"), text, flags=re.MULTILINE)
    total = sum(about.minutes for about in checks)
    last = checks[-1].name
    which = f'"{PART_OF[last]}"' if last in PART_OF else last.rpartition("-")[2]
    one = "the part" if last in PART_OF else f"exercise {which}"
    example = f"`check.{topic[1]}.hint({which})` one for {one}"
    text = re.sub(r"`check\.\w+\.hint\([^)]+\)` one for (?:exercise \d+|the part)", example, text, count=1)
    start = f"{NUMBERS[len(checks)]} exercise{'s' * (len(checks) > 1)} for"
    text = re.sub(r"^[A-Z][a-z]+ exercises? for(?= \[)", start, text, count=1, flags=re.MULTILINE)
    return re.sub(r"\d+ minutes in all", f"{total} minutes in all", text, count=1)


def target_of(page: Path) -> Path:
    """Return the exercise of a solution, which has a folder of its own beside its wrong and right answers.

    >>> str(target_of(Path("solutions/pp/gpipe/gpipe.md")))
    'exercises/pp/gpipe.md'
    """
    return Path("exercises", *page.parts[1:-2], page.name)


def strip_solution(source: str, where: str) -> str:
    """Replace every solution in a cell's source; Refused if the markers do not match."""
    kept: list[str] = []
    opened = 0  # the line of BEGIN
    stub: list[str] | None = None  # the lines after STUB
    for number, line in enumerate(source.splitlines(), 1):
        marker, indent = line.strip(), line[: len(line) - len(line.lstrip())]
        if marker == BEGIN:
            if opened:
                raise Refused(f"{where}, line {number}: {BEGIN} again, the one of line {opened} has no end")
            opened, stub = number, None
        elif marker in (STUB, END) and not opened:
            raise Refused(f"{where}, line {number}: {marker} without {BEGIN} before it")
        elif marker == STUB:
            stub = []
        elif marker == END:
            kept += [indent + TODO] if stub is None else stub
            opened = 0
        elif re.search(r"###\s*(BEGIN|END|STUB)\b", line):
            raise Refused(f"{where}, line {number}: {marker!r} is no marker; write {BEGIN}, {STUB} or {END} alone")
        elif not opened:
            kept.append(line)
        elif stub is not None:
            stub.append(re.sub(r"^(\s*)# ?", r"\1", line))
    if opened:
        raise Refused(f"{where}, line {opened}: {BEGIN} without {END} after it")
    return "\n".join(kept).rstrip()


def one_folder_up(text: str) -> str:
    """Return a solution's text with its links as an exercise needs them."""
    return text.replace("](../../../", "](../../")


def make(path: Path, target: Path) -> Any:
    """Return the exercise notebook of one solution page."""
    notebook = jupytext.read(path)
    cells: list[Any] = []
    for index, cell in enumerate(notebook.cells):
        where = f"{path}, cell {index}"
        source = strip_solution(cell.source, where) if cell.cell_type == "code" else one_folder_up(cell.source)
        if cell.cell_type == "code":
            _check_tag(cell, source != cell.source, where)
        if source.strip():
            cell.source = source
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
            cells.append(cell)
    first = next((index for index, cell in enumerate(cells) if cell.cell_type == "code"), len(cells))
    _check_checks(path, cells)
    ways = nbformat.v4.new_markdown_cell(ways_on(path, target))  # type: ignore[no-untyped-call]
    notebook.cells = [*cells[:first], _installer(target), *cells[first:], ways]
    return notebook


def ways_on(path: Path, target: Path) -> str:
    """Return the last line of an exercise: to its chapter, and to the exercises before and after it."""
    table = yaml.safe_load(Path(CONTENTS).read_text(encoding="utf-8"))
    listed = [f"{name}.md" for name in in_reading_order(table) if chapter_of(name)]
    names = [name for name in listed if _solution_of(name).is_file()]
    here = names.index(target.as_posix()) if target.as_posix() in names else len(names)
    ways = [f"Back to the chapter: {_link(target, target.as_posix().replace('exercises/', 'book/', 1), _title(path))}"]
    if 0 < here < len(names):
        ways.insert(0, f"Previous exercises: {_link(target, names[here - 1], _title(_solution_of(names[here - 1])))}")
    if here + 1 < len(names):
        ways.append(f"Next exercises: {_link(target, names[here + 1], _title(_solution_of(names[here + 1])))}")
    return " · ".join(ways)


def _solution_of(exercise: str) -> Path:
    name = Path(exercise)
    return Path("solutions", *name.parts[1:-1], name.stem, name.name)


def _title(page: Path) -> str:
    found = re.search(r"^# (?:Exercises: )?(.+?) *$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else page.stem


def _link(page: Path, target: str, title: str) -> str:
    return f"[{title}]({os.path.relpath(target, page.parent)})"


def _installer(target: Path) -> Any:
    url, branch = install_cell.address(Path("_config.yml").read_text(encoding="utf-8"))
    source = install_cell.code(url, branch, target.parent.as_posix())
    metadata = {"jupyter": {"source_hidden": True}, "tags": install_cell.TAGS}
    return nbformat.v4.new_code_cell(source, metadata=metadata)  # type: ignore[no-untyped-call]


def _check_tag(cell: Any, has_solution: bool, where: str) -> None:
    answers = [tag for tag in _tags(cell) if tag.startswith("answer-")]
    if has_solution and len(answers) != 1:
        raise Refused(f"{where}: a cell with a solution needs one tag such as answer-gpipe-1, it has {answers}")
    if answers and not has_solution:
        raise Refused(f"{where}: {answers[0]} has no {BEGIN}: its solution would be handed out")


def _check_checks(path: Path, cells: list[Any]) -> None:
    tags = [tag for cell in cells for tag in _tags(cell) if re.match("(answer|check)-", tag)]
    answers = [tag.removeprefix("answer-") for tag in tags if tag.startswith("answer-")]
    if tags != [f"{kind}-{name}" for name in answers for kind in ("answer", "check")]:
        raise Refused(f"{path}: every answer-X must be followed by its own check-X, found {', '.join(tags)}")


def _tags(cell: Any) -> tuple[str, ...]:
    return tuple(cell.metadata.get("tags", ()))


def cells_of(notebook: Any) -> list[Cell]:
    """The comparable part of a notebook."""
    return [Cell(cell.cell_type, cell.source.strip(), _tags(cell)) for cell in notebook.cells]


def difference(made: list[Cell], path: Path) -> str | None:
    """Name the first cell of a file that is not what it should be."""
    if not path.exists():
        return f"{path} is missing"
    found = cells_of(jupytext.read(path))
    for index, (expected, actual) in enumerate(zip(made, found, strict=False)):
        if expected != actual:
            name = " ".join(expected.tags) or (expected.text.splitlines() or ["(empty)"])[0]
            return f"{path}, cell {index} ({expected.kind}, {name!r}) is not what the solution makes"
    return f"{path} has {len(found)} cells, expected {len(made)}" if len(found) != len(made) else None


def check(made: dict[Path, Any], root: Path) -> list[str]:
    """Describe how the exercises on disk differ from those that the solutions make."""
    wanted = {path.with_suffix(suffix): notebook for path, notebook in made.items() for suffix in FORMS}
    found = {path for suffix in FORMS for path in root.rglob(f"*{suffix}") if ".ipynb_checkpoints" not in path.parts}
    problems = [difference(cells_of(notebook), path) for path, notebook in wanted.items()]
    strangers = [f"{path} is made by no solution" for path in sorted(found - set(wanted))]
    return [problem for problem in problems if problem] + strangers


def write(made: dict[Path, Any]) -> None:
    """Write both forms of every exercise that is not up to date."""
    for path, notebook in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix, form in zip(FORMS, ("md:myst", "ipynb"), strict=True):
            target = path.with_suffix(suffix)
            if difference(cells_of(notebook), target):
                jupytext.write(notebook, target, fmt=form)
                print(f"wrote {target}")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def official(pages: list[Path]) -> dict[Path, str]:
    """Return the files of the official trainer: the answer cells of its parts, with imports of each other."""
    found = {}
    for page in pages:
        for cell in jupytext.read(page).cells:
            for tag in _tags(cell):
                if part := PART_OF.get(tag.removeprefix("answer-")) if tag.startswith("answer-") else None:
                    text = without_marks(cell.source).replace("from mine.", "from .")
                    found[Path("dualpipe_ours", f"{part}.py")] = f"{text}\n"
    return found


def run_solutions(pages: list[Path]) -> None:
    """Execute every solution and store it with its outputs beside the page."""
    from nbclient import NotebookClient

    for page in pages:
        notebook = jupytext.read(page)
        NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(page.parent)}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # when it ran is no one's business, and would differ each time
        nbformat.write(notebook, page.with_suffix(".ipynb"))  # type: ignore[no-untyped-call]
        print(f"ran {page}")


def main(arguments: list[str]) -> int:
    """Write, check or run, below the current folder."""
    pages = sorted(path for path in Path("solutions").rglob("*.md") if ".ipynb_checkpoints" not in path.parts)
    if not arguments:
        for page in pages:
            text = page.read_text(encoding="utf-8")
            if (facts := with_facts(text)) != text:
                page.write_text(facts, encoding="utf-8")
                print(f"wrote {page}")
    try:
        targets = {page: target_of(page) for page in pages}
        made = {target: make(page, target) for page, target in targets.items()}
    except Refused as error:
        print(error)
        return 1
    stale = [page for page in pages if with_facts(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    if arguments[:1] == ["--run"]:
        run_solutions([page for page in pages if page.stem in arguments[1:] or len(arguments) == 1])
    elif arguments == ["--check"]:
        problems = [f"{page}: titles, kinds or minutes are not those of its checks" for page in stale]
        problems += check(made, Path("exercises"))
        problems += [f"{path} is not its answer cell" for path, text in official(pages).items() if _text(path) != text]
        print("\n".join([*problems, REMEDY]) if problems else f"{len(made)} exercise pages follow from their solutions")
        return 1 if problems else 0
    else:
        write(made)
        for path, text in official(pages).items():
            if _text(path) != text:
                path.write_text(text, encoding="utf-8")
                print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
