"""The progress page: what of the course is solved, part by part, as text or, in a notebook, as tables that fold."""

from html import escape

from dualpipe_course import record
from dualpipe_course.exercise import Check
from dualpipe_course.own.folder import states
from dualpipe_course.own.parts import PARTS as OWN
from dualpipe_course.registry import TOPICS, all_checks, topic
from dualpipe_course.retired import RETIRED

COLUMNS = ("exercise", "what", "kind", "minutes", "points", "state")
PARTS = {
    "start": "start", "dp": "data parallelism", "tp": "tensor parallelism", "pp": "pipelines",
    "cp": "context parallelism", "ep": "expert parallelism", "whole": "all together", "hosts": "many hosts",
}  # fmt: skip


class Progress:
    """The exercises of the course and what is known of each; prints as one table for each part.

    Only notebooks in the current folder count: each folder keeps its own record.
    """

    def __init__(self, entries: dict[str, record.Entry]) -> None:
        self._entries = entries

    def parts(self) -> dict[str, list[tuple[str, ...]]]:
        """The exercises of each part, under a line that counts them: one row of `COLUMNS` for each."""
        parts: dict[str, list[tuple[str, ...]]] = {}
        for folder, name in PARTS.items():
            found = [one for key, at in TOPICS.items() if at.startswith(f"{folder}.") for one in topic(key)]
            solved = sum(self._of(check).solved for check in found)
            parts[f"{name}: {solved} of {len(found)} solved"] = [self._row(check) for check in found]
        return parts

    def _of(self, check: Check) -> record.Entry:
        return self._entries.get(check.name, record.NOTHING)

    def _row(self, check: Check) -> tuple[str, ...]:
        entry, about = self._of(check), check.about
        tried = f"{entry.attempts} attempt{'s' * (entry.attempts > 1)}" if entry.attempts else "open"
        state = "solved" if entry.solved else tried
        return about.name, about.title, about.kind, str(about.minutes), str(about.points), state

    def summary(self) -> str:
        """One line: how much is solved, how long the rest takes, and what was solved that the course no longer has."""
        everything = all_checks()
        left = [check for check in everything if not self._of(check).solved]
        done = [check for check in everything if check not in left]
        points, earned = (sum(check.about.points for check in some) for some in (everything, done))
        minutes = sum(check.about.minutes for check in left)
        gone = [name for name in RETIRED if self._entries.get(name, record.NOTHING).solved]
        retired = f"; solved and no longer in the course: {', '.join(gone)}" if gone else ""
        solved = f"{len(done)} of {len(everything)} solved"
        trail = [check not in left for check in everything if check.about.trail]
        on_trail = f"on the trail {sum(trail)} of {len(trail)}"
        mine = [part for part, state in states().items() if state == "own"]
        on_trail += f"; parts of your trainer {len(mine)} of {len(OWN)}"
        return f"{solved}, {earned} of {points} points, {minutes} minutes left; {on_trail}{retired}"

    def __str__(self) -> str:
        parts = self.parts()
        rows = [COLUMNS, *(row for found in parts.values() for row in found)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        lines = [self.summary()]
        for line, found in parts.items():
            lines += ["", line]
            lines += ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [COLUMNS, *found]]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = "".join(f'<th scope="col" style="text-align:left">{name}</th>' for name in COLUMNS)
        html = f"<p>{escape(self.summary())}</p>"
        for line, rows in self.parts().items():
            cells = ("".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row) for row in rows)
            body = "".join(f"<tr>{row}</tr>" for row in cells)
            begun = any(row[-1] != "open" for row in rows) and any(row[-1] != "solved" for row in rows)
            table = f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
            html += f"<details{' open' * begun}><summary>{escape(line)}</summary>{table}</details>"
        return html


def progress() -> Progress:
    """Return the progress page of this folder's notebooks."""
    return Progress(record.load())
