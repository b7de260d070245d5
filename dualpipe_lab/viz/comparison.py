"""Up to three timelines on one axis: simulated, virtual and measured runs of one program, or several schedules.

Chapter: book/start/time.  In: timelines in one unit.  Out: a drawing as text, HTML or file.
The sliders recompute the simulated timelines.  Pointing at an action marks it in all timelines.
"""

from pathlib import Path
from typing import Any

from dualpipe_lab.timeline import Timeline
from dualpipe_lab.viz.embed import page, timeline_html
from dualpipe_lab.viz.spec import timeline_spec


class Comparison:
    """One to three timelines on one axis; the result of `compare`."""

    def __init__(self, timelines: tuple[Timeline, ...], options: dict[str, Any]) -> None:
        timeline_spec(timelines)  # says at once what cannot be drawn together
        self.timelines = timelines
        self.options = options

    def to_html(self, script: bool = True) -> str:
        """Return the element around static pictures; `script=False` if the page already has the script."""
        return timeline_html(*self.timelines, script=script, **self.options)

    def save(self, path: str | Path) -> None:
        """Write the drawing as one HTML file that needs no network."""
        title = " and ".join(dict.fromkeys(timeline.name for timeline in self.timelines))
        Path(path).write_text(page(self.to_html(), title), encoding="utf-8")

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.timelines))

    def __repr__(self) -> str:
        return f"<Comparison of {' and '.join(repr(timeline.name) for timeline in self.timelines)}>"

    def _repr_html_(self) -> str:
        return self.to_html()


def compare(*timelines: Timeline, **options: Any) -> Comparison:
    """Draw one to three timelines on one axis.

    `options`: the initial state: time=12 (in the timelines' unit), selection="3F2", colour_by ("kind", "direction",
    "stage" or "microbatch"), memory (bands of "rank", the chosen one, or of "all"), streams (True: messages too), and
    activation_bytes (of one stage and microbatch, for bands in bytes).
    Raises ValueError for no timeline, more than three, timelines in different units, or an unknown option.

    >>> from dualpipe_lab import schedules, simulate
    >>> programs = [schedules.build(name, num_ranks=2, num_microbatches=3) for name in ("gpipe", "1f1b")]
    >>> compare(*map(simulate, programs))
    <Comparison of 'GPipe' and '1F1B'>
    """
    return Comparison(timelines, options)
