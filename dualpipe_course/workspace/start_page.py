"""The page that JupyterLab opens first: where to go on, what is solved, the parts of the course.

In: a workspace after its renewal.  Out: `start.md`, written anew at each start and when an exercise is solved; what a
learner wrote into it is kept.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from dualpipe_course import record
from dualpipe_course.own import folder as own
from dualpipe_course.own.parts import PARTS, RUNS, SHORT_WAY, number_of
from dualpipe_course.workspace import stack
from dualpipe_course.workspace.contents import Contents, Page, Part, read, tags_of
from dualpipe_course.workspace.given import Folder, digest

NAME = PLACE = "start.md"
SOLVED, OPEN = "■", "□"
FOOT = """\
## How this folder works

- These notebooks are your copies: change them as you like. `make lab` renews those that you left as they were.
  Where you changed one, yours stays, and a new version of the course stands beside it as `NAME.new.ipynb`.
- To start a chapter afresh: `make fresh chapter=gpipe`, or `dualpipe-lab fresh gpipe` in a terminal (File, New,
  Terminal). What you had goes to the folder `old` with its date. `gpipe-exercises` means the exercises.
- *Run All Cells* stops at the first open exercise, because its check raises an error. To go on, click the cell after
  that check and choose *Run, Run Selected Cell and All Below*.
- Solutions lie in the course's own folder: `solutions/pp/gpipe/gpipe.ipynb` has those of `pp/gpipe`. Open one to
  compare when your check has passed, or when the last hint has not helped.
- {about}this page is written anew at each start and whenever an exercise is solved.
"""
ABOUT = "[For learners](about/learners.md) says how exercises, hints and live cells work; "
NEWS = "## New since the last start"
TRAINER = """\
## Your trainer

![{words}]({picture})

The trail has {num} parts of a trainer, each the task of a page: a check that passes writes your cell to `mine/`, and
later parts import it. In place of a part that you have not written the course's own runs, so you can begin anywhere.

- **All parts**, some 23 hours of writing (an estimate): {parts}.
- **The short way**, twelve parts, some 10 hours: {short}.
- **Four runs** train with what you have, each beside one process: `check.run("dense")` after the Llama block,
  `check.run("pipeline")` after Zero Bubble, `check.run("experts")` after V3-MoE, `check.run("together")` on the last
  page. A box is blue where every part that the run calls is yours.
- You may edit a file in `mine/` and hand it to its check by `take="file"`; until it passes, the course's own runs.
"""
NO_OUTPUTS = """\
The notebooks show no results yet, because the book was not built in this folder's course: run their cells, or run
`make book` and then `make lab`, which puts the results into every notebook that you left as it was.
"""


def write(folder: Folder, table: Contents, news: list[str], shows: bool) -> None:
    """Write the page: `news` are sentences about this renewal, `shows` says whether there are outputs."""
    entries = record.load(folder.path)
    parts = [_part(number, part, folder, entries) for number, part in enumerate(table.parts, 1)]
    told = "".join(f"- {line}\n" for line in news)
    about = ABOUT if any(page.place == "about/learners.md" for page in table.texts) else ""
    blocks = [
        f"# {table.home.title}",
        _go_on(folder, table, entries),
        _summary(folder, table, entries),
        _trainer(folder, table, entries),
        "" if shows else NO_OUTPUTS,
        f"{NEWS}\n\n{told}" if told else "",
        *parts,
        FOOT.format(about=about),
    ]
    text = "\n\n".join(block.strip() for block in blocks if block) + "\n"
    given, data = folder.given.get(NAME), folder.read(PLACE)
    if data is not None and not (given and digest(data) == given.data):
        folder.keep(PLACE)
    folder.give(NAME, PLACE, text.encode(), "")


def update(course: Path, path: Path) -> None:
    """Write the page of a workspace anew, with the news of the last start."""
    folder = Folder(path)
    with folder.locked():
        before = (folder.read(PLACE) or b"").decode(errors="replace")
        news = re.search(rf"^{NEWS}\n\n((?:- .*\n)*)", before, re.MULTILINE)
        lines = [line.removeprefix("- ") for line in news[1].splitlines()] if news else []
        write(folder, read(course), lines, NO_OUTPUTS not in before)
        folder.save()


def _go_on(folder: Folder, table: Contents, entries: dict[str, record.Entry]) -> str:
    """Return the sentence that leads to the next page: the one touched last, or the one after it if it is done."""
    pages = [page for chapter in table.chapters() for page in (chapter.page, chapter.exercises) if page]
    touched = [(time, page) for page in pages if (time := _touched(folder, page))]
    home = f"[The course in one page]({_place(folder, table.home)}) says what it is about."
    if not touched:
        return f"**Begin with [{pages[0].title}]({_place(folder, pages[0])}).** {home}"
    time, last = max(touched, key=lambda one: one[0])
    when = f"{datetime.fromtimestamp(time):%d %B %Y, %H:%M}"
    solved = _solved(folder, last, entries)
    if solved and all(solved) and last != pages[-1]:
        after = pages[pages.index(last) + 1]
        return f"**Go on with [{after.title}]({_place(folder, after)}).** {last.title} is solved ({when}). {home}"
    return f"**Go on with [{last.title}]({_place(folder, last)}).** You were there last, on {when}. {home}"


def _summary(folder: Folder, table: Contents, entries: dict[str, record.Entry]) -> str:
    solved = [one for chapter in table.chapters() for one in _solved(folder, chapter.exercises, entries)]
    return f"{sum(solved)} of {len(solved)} exercises are solved."


def _trainer(folder: Folder, table: Contents, entries: dict[str, record.Entry]) -> str:
    """Draw the learner's trainer beside the page; return the section about it."""
    states = own.states(folder.path / own.NAME)
    equal = [name for name in RUNS if entries.get(number_of(name), record.NOTHING).solved]
    if folder.read(stack.NAME) != (drawn := stack.picture(states, equal).encode()):
        folder.write(stack.NAME, drawn)
    places = {
        tag.split("-")[1]: _place(folder, chapter.exercises)
        for chapter in table.chapters()
        if chapter.exercises
        for tag in tags_of(folder.path / _place(folder, chapter.exercises))
        if tag.startswith("check-")
    }

    def links(parts: Iterable[str]) -> str:
        return ", ".join(f"[{part}]({places[PARTS[part]]})" if PARTS[part] in places else part for part in parts)

    return TRAINER.format(
        words=stack.in_words(states), picture=stack.NAME, num=len(PARTS), short=links(SHORT_WAY), parts=links(PARTS)
    )


def _part(number: int, part: Part, folder: Folder, entries: dict[str, record.Entry]) -> str:
    rows = [f"## {number}. {part.caption}", "", "| trail | chapter | exercises | solved |", "|---|---|---|---|"]
    for chapter in part.chapters:
        solved = _solved(folder, chapter.exercises, entries)
        marks = f"{SOLVED * sum(solved)}{OPEN * (len(solved) - sum(solved))} {sum(solved)} of {len(solved)}"
        page, more = chapter.page, chapter.exercises
        link = f"[exercises]({_place(folder, more)})" if more else ""
        title = f"[{page.title}]({_place(folder, page)})" + (" (lecture)" if chapter.in_lecture else "")
        rows.append(f"| {chapter.number or ''} | {title} | {link} | {marks if solved else ''} |")
    return "\n".join(rows)


def _place(folder: Folder, page: Page) -> str:
    given = folder.given.get(page.source)
    return given.place if given else page.place


def _touched(folder: Folder, page: Page) -> float:
    """When a copy was changed or run; 0 for one that is as it was given out."""
    given, data = folder.given.get(page.source), folder.read(_place(folder, page))
    if data is None or (given and given.data == digest(data)):
        return 0.0
    return (folder.path / _place(folder, page)).stat().st_mtime


def _solved(folder: Folder, page: Page | None, entries: dict[str, record.Entry]) -> list[bool]:
    """Whether each exercise of a page is solved."""
    tags = tags_of(folder.path / Path(_place(folder, page))) if page else []
    names = [tag.removeprefix("check-") for tag in tags if tag.startswith("check-")]
    return [entries.get(name, record.NOTHING).solved for name in names]
