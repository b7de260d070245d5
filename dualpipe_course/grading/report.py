"""The results as a table in the terminal, as CSV (one row per exercise, or per learner) and as one HTML page.

The page begins with a grid for each notebook, learners by exercises, and ends with every message.
Text of learners is written as text, never as markup or as a spreadsheet formula.  Control characters, and characters
without a UTF-8 encoding (half of a surrogate pair, a file name in another encoding), are escaped.
"""

import csv
from collections import Counter
from html import escape
from pathlib import Path
from unicodedata import category

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dualpipe_course.grading.grader import Graded, Mark
from dualpipe_course.own.parts import PARTS, RUNS, number_of
from dualpipe_course.own.runs import part_of

COLUMNS = ("learner", "notebook", "exercise", "points", "out of", "status", "seconds", "message", "notes")
NBVAL_COLUMNS = ("nbval", "nbval message")
_SIGNS = {
    "right": "✓", "wrong": "✗", "error": "!", "stopped": "⊘", "not started": "·", "missing": "?", "unreadable": "?"
}  # fmt: skip
_LEGEND = "✓ right  ✗ wrong  ! error: no answer to judge  ⊘ stopped  · not started  ? missing or unreadable"
_STYLE = """body{font:15px system-ui,sans-serif;margin:2rem;color:#222;background:#fff}table{border-collapse:collapse}
th,td{border:1px solid #bbb;padding:.3rem .6rem;text-align:left;vertical-align:top}td.n{text-align:right}
td,summary,pre,p{overflow-wrap:anywhere}.grid{overflow-x:auto;margin-bottom:1.5rem}.grid td{text-align:center}
.grid th{font-weight:400}pre{margin:0;white-space:pre-wrap;max-width:60rem}details{margin:.2rem 0}
.right{background:#e2f2e2}.wrong,.error,.stopped{background:#fbe4de}.missing,.unreadable{background:#fdf3d0}
@media(max-width:40rem){body{margin:.8rem}.all thead{display:none}.all tr,.all td{display:block;border:0}
.all tr{border-top:1px solid #bbb}.all td.n{text-align:left}}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}.right{background:#1d3a1d}
.wrong,.error,.stopped{background:#4a241b}.missing,.unreadable{background:#443a14}}"""


def screen(results: list[Graded]) -> Group:
    """Return a rich table with one row per submission, and below it, over the whole width, the notes.

    A note that most submissions share stands there once.
    """
    common = _common_notes(results)
    table = Table(title=f"Grades: {_LEGEND}")
    for name in ["learner", "notebook", "exercises", "points", "seconds"] + ["nbval"] * has_replays(results):
        names = name in ("learner", "notebook")
        table.add_column(
            name, justify="right" if name in ("points", "seconds") else "left", no_wrap=not names, overflow="fold"
        )
    notes = [*common.values()]
    for graded in results:
        signs = " ".join(f"{mark.name.rpartition('-')[2]}{_SIGNS[mark.status]}" for mark in graded.marks)
        points = f"{graded.points:g} / {graded.out_of}"
        cells = [plain(graded.learner), graded.notebook or "-", signs, points, f"{graded.seconds:g}"]
        cells += [plain(each.status) for each in [graded.replayed] if each]
        table.add_row(*map(Text, cells))  # Text: brackets in a name are no markup
        if own := "; ".join(note for note in graded.notes if note not in common):
            notes.append(", ".join(filter(None, [graded.learner, graded.notebook])) + f": {own}")
    return Group(table, *(Text(plain(note)) for note in [*parts_of(results), *notes]))


def parts_of(results: list[Graded]) -> list[str]:
    """One line for each learner with parts: how many are right, and which runs are equal to one process."""
    by_learner: dict[str, dict[str, str]] = {}
    for graded in results:
        for mark in graded.marks:
            if what := part_of(mark.name) or (mark.name if graded.notebook == "runs" else ""):
                known = by_learner.setdefault(graded.learner, {})
                known[what] = "right" if "right" in (mark.status, known.get(what)) else mark.status
    lines = []
    for learner, found in by_learner.items():
        right = [what for what, status in found.items() if status == "right"]
        runs = [run for run in RUNS if number_of(run) in right]
        parts = f"{learner}: parts {sum(what in PARTS for what in right)} of {len(PARTS)}"
        lines.append(f"{parts}, runs {len(runs)} of {len(RUNS)}{': ' * bool(runs)}{', '.join(runs)}")
    return lines


def write_csv(results: list[Graded], path: Path) -> None:
    """Write one row per exercise, and one row for a submission without exercises."""
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS + NBVAL_COLUMNS * has_replays(results))
        for graded in results:
            for mark in graded.marks or [Mark("", 0, 0, "unreadable", "", 0)]:
                values = (mark.name, mark.points, mark.out_of, mark.status, mark.seconds, mark.message)
                nbval = [text for each in [graded.replayed] if each for text in (each.status, each.message)]
                row = (graded.learner, graded.notebook, *values, "; ".join(graded.notes), *nbval)
                writer.writerow([_harmless(value) for value in row])


def write_gradebook(results: list[Graded], path: Path) -> None:
    """Write one row per learner for a learning-management system: the points of each exercise, and their total.

    The best counts where a learner handed in an exercise twice; what was not handed in is empty.
    """
    out_of = {mark.name: mark.out_of for graded in results for mark in graded.marks}
    names = sorted(out_of, key=lambda name: (name.rpartition("-")[0], int(name.rpartition("-")[2])))
    rows: dict[str, dict[str, float]] = {}
    for graded in results:
        row = rows.setdefault(graded.learner, {})
        row |= {mark.name: max(mark.points, row.get(mark.name, 0)) for mark in graded.marks}
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        heads = [f"{name} [{out_of[name]}]" for name in names]
        writer.writerow(["learner", *heads, f"total [{sum(out_of.values())}]"])
        for learner, row in rows.items():
            points = [f"{row[name]:g}" if name in row else "" for name in names]
            writer.writerow([_harmless(learner), *points, f"{sum(row.values()):g}"])


def write_html(results: list[Graded], path: Path) -> None:
    """Write one self-contained page: the grids, a table, and each message in a foldable element."""
    grids = "".join(_grid(name, results) for name in sorted({graded.notebook for graded in results if graded.marks}))
    common = _common_notes(results)
    rows = "\n".join(_row(graded, common) for graded in results)
    below = "".join(f"<p>{escape(text)}</p>" for text in [*parts_of(results), *common.values()])
    earned, possible = sum(graded.points for graded in results), sum(graded.out_of for graded in results)
    names = ["learner", "notebook", "points", "seconds", "exercises"] + ["nbval"] * has_replays(results)
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    path.write_text(
        f"{head}<title>Grades</title><style>{_STYLE}</style><h1>Grades</h1>"
        f"<p>{len(results)} submissions, {earned:g} of {possible} points.</p><p>{_LEGEND}</p>{grids}"
        '<h2>Every message</h2><table class="all"><thead><tr>'
        + "".join(f'<th scope="col">{name}</th>' for name in names)
        + f"</tr></thead><tbody>{rows}</tbody></table>{below}</html>\n",
        encoding="utf-8",
        errors="backslashreplace",
    )


def has_replays(results: list[Graded]) -> bool:
    """Whether nbval was asked for: its columns are there for all submissions or for none."""
    return any(graded.replayed for graded in results)


def _common_notes(results: list[Graded]) -> dict[str, str]:
    """Return the notes that most submissions share, each with the line that stands once below the table."""
    counts = Counter(note for graded in results for note in dict.fromkeys(graded.notes))
    shared = {note: number for note, number in counts.items() if number > max(1, len(results) / 2)}
    return {note: f"{number} of {len(results)} submissions: {note}" for note, number in shared.items()}


def plain(text: str) -> str:
    r"""Return text for a terminal, with control, invisible and unencodable characters escaped.

    >>> print(plain("a" + chr(27) + "[2J" + chr(0xD800)))
    a\x1b[2J\ud800
    """
    return "".join(c if category(c) not in ("Cc", "Cf", "Cs") else repr(c)[1:-1] for c in text)


def _grid(notebook: str, results: list[Graded]) -> str:
    """Return the table of one notebook: a row for each learner, a column for each exercise, counts at its foot."""
    rows = [graded for graded in results if graded.notebook == notebook and graded.marks]
    names = list(dict.fromkeys(mark.name for graded in rows for mark in graded.marks))
    head = "".join(f'<th scope="col">{escape(name.rpartition("-")[2])}</th>' for name in names)
    body, right, points = "", dict.fromkeys(names, 0), 0.0
    for graded in rows:
        marks = {mark.name: mark for mark in graded.marks}
        cells = "".join(_sign(marks.get(name)) for name in names)
        body += f'<tr><th scope="row">{escape(graded.learner)}</th>{cells}<td>{graded.points:g}</td></tr>'
        points += graded.points
        for mark in graded.marks:
            right[mark.name] += mark.status == "right"
    counts = "".join(f"<td>{number} of {len(rows)}</td>" for number in right.values())
    foot = f'<tr><th scope="row">right</th>{counts}<td>{points:g}</td></tr>'
    return (
        f'<h2>{escape(notebook)}</h2><div class="grid" tabindex="0"><table><thead><tr><th scope="col">learner</th>'
        f'{head}<th scope="col">points</th></tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table></div>'
    )


def _sign(mark: Mark | None) -> str:
    if mark is None:
        return "<td></td>"
    words = escape(f"{mark.name}: {mark.status}, {mark.points:g} of {mark.out_of}", quote=True)
    return f'<td class="{mark.status.replace(" ", "-")}" title="{words}">{_SIGNS[mark.status]}</td>'


def _row(graded: Graded, common: dict[str, str]) -> str:
    notes = "".join(f"<p>{escape(note)}</p>" for note in graded.notes if note not in common)
    marks = "".join(
        f'<details class="{mark.status.replace(" ", "-")}"><summary>{_SIGNS[mark.status]} {escape(mark.name)}: '
        f"{mark.status}, {mark.points:g} of {mark.out_of}, {mark.seconds:g} s{_begins(mark)}</summary>"
        f"<pre>{escape(mark.message)}</pre></details>"
        for mark in graded.marks
    )
    texts = f"<td>{escape(graded.learner)}</td><td>{escape(graded.notebook or '-')}</td>"
    numbers = f'<td class="n">{graded.points:g} / {graded.out_of}</td><td class="n">{graded.seconds:g}</td>'
    return f"<tr>{texts}{numbers}<td>{notes}{marks}</td>{_replayed(graded)}</tr>"


def _begins(mark: Mark) -> str:
    """The beginning of a message that says what is wrong."""
    first = mark.message.partition("\n")[0]
    if mark.status not in ("wrong", "error") or not first:
        return ""
    return f"; {escape(first[:100])}{' ...' * (len(first) > 100)}"


def _replayed(graded: Graded) -> str:
    found = graded.replayed
    if not found:
        return ""
    if not found.message:
        return f"<td>{escape(found.status)}</td>"
    return f"<td><details><summary>{escape(found.status)}</summary><pre>{escape(found.message)}</pre></details></td>"


def _harmless(value: object) -> object:
    """Quote text that a spreadsheet would execute as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
