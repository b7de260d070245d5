"""The progress page: what of the course is solved, as text or, in a notebook, as a table."""

from html import escape

from dualpipe_course import record
from dualpipe_course.registry import all_checks
from dualpipe_course.retired import RETIRED

COLUMNS = ("exercise", "what", "kind", "minutes", "points", "state")


class Progress:
    """The exercises of the course and what is known of each; prints as a table.

    Only notebooks in the current folder count: each folder keeps its own record.
    """

    def __init__(self, entries: dict[str, record.Entry]) -> None:
        self._entries = entries

    def rows(self) -> list[tuple[str, ...]]:
        """One row per exercise: `COLUMNS`."""
        rows: list[tuple[str, ...]] = []
        for check in all_checks():
            entry = self._entries.get(check.name, record.NOTHING)
            tried = f"{entry.attempts} attempts" if entry.attempts else "open"
            about = check.about
            state = "solved" if entry.solved else tried
            rows.append((about.name, about.title, about.kind, str(about.minutes), str(about.points), state))
        return rows

    def summary(self) -> str:
        """One line: how much is solved, how long the rest takes, and what was solved that the course no longer has."""
        checks = all_checks()
        left = [check for check in checks if not self._entries.get(check.name, record.NOTHING).solved]
        points, earned = (sum(c.about.points for c in some) for some in (checks, [c for c in checks if c not in left]))
        minutes = sum(check.about.minutes for check in left)
        gone = [name for name in RETIRED if self._entries.get(name, record.NOTHING).solved]
        retired = f"; solved and no longer in the course: {', '.join(gone)}" if gone else ""
        solved = f"{len(checks) - len(left)} of {len(checks)} solved"
        trail = [check not in left for check in checks if check.about.trail]
        on_trail = f"on the trail {sum(trail)} of {len(trail)}"
        return f"{solved}, {earned} of {points} points, {minutes} minutes left; {on_trail}{retired}"

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.summary(), "", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows())
        summary = escape(self.summary())
        return f"<p>{summary}</p><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def progress() -> Progress:
    """Return the progress page of this folder's notebooks."""
    return Progress(record.load())
