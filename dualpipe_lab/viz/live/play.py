"""`play`: one line in a cell, for a drawing whose numbers, verdict and closed form follow sliders and drop-downs.

Chapter: book/pp/gpipe.  In: schedules, a program, or a function of what the reader changes.  Out: HTML, and a widget.
The HTML holds the drawing at its start and plays without a kernel: in published pages, exports and notebooks that were
saved and opened again.  A running notebook puts the ipywidgets into it (`live.widget`); the saved output holds none, so
that JupyterLab has no widget to miss.
Elsewhere: `ipywidgets.interact`, whose output a published page does not show.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_lab._optional import MissingExtra
from dualpipe_lab.ep.overlap.order import Order
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules.variants import variant
from dualpipe_lab.timeline import Timeline
from dualpipe_lab.viz.embed import Comparison, Spec, element, has_kernel, timeline_spec
from dualpipe_lab.viz.live import pipeline
from dualpipe_lab.viz.live.pipeline import Control, split_controls, words_of
from dualpipe_lab.viz.steplog import Steps

if TYPE_CHECKING:
    from dualpipe_lab.viz.live.widget import LiveWidget

Played: TypeAlias = str | Sequence[str] | Program | Order | Callable[..., Any]

_HOW = "Run this cell in a notebook to get its controls: {}."


class Play:
    """A drawing with numbers that follow controls; the result of `play`.

    Attributes:
        controls: what the reader changes.
        values: the current values by name.
        outcome: drawing, numbers and verdict of the latest values that were not refused.
        error: one sentence if the current values are refused, otherwise "".
    """

    def __init__(self, function: Callable[..., Any], controls: Sequence[Control], fixed: Mapping[str, Any]) -> None:
        self.controls, self.error = list(controls), ""
        self.values: dict[str, Any] = {**fixed, **{control.name: control.start for control in controls}}
        self._function = function
        self.outcome = pipeline.outcome_of(function(**self.values))

    def set(self, **values: Any) -> "Play":
        """Change values as the controls do; what is refused shows its sentence, and the last drawing stays.

        Raises ValueError for a name that is no control.

        >>> live = play("interleaved", num_ranks=(2, 8), num_microbatches=(1, 16))
        >>> live.set(num_ranks=3).outcome.numbers["makespan"]
        ('54 ticks', '54 ticks')
        """
        known = [control.name for control in self.controls]
        if strange := set(values) - set(known):
            raise ValueError(f"there is no control {min(strange)!r}; use one of {', '.join(known)}")
        self.values |= values
        try:
            self.outcome, self.error = pipeline.outcome_of(self._function(**self.values)), ""
        except Exception as error:
            self.error = pipeline.sentence(error)
        return self

    @property
    def state(self) -> Spec:
        """What the page shows, as JSON values; the drawing apart."""
        pairs = [value if isinstance(value, tuple) else (value, "") for value in self.outcome.numbers.values()]
        rows = [[name, *map(words_of, pair)] for name, pair in zip(self.outcome.numbers, pairs, strict=True)]
        told = {"verdict": self.outcome.verdict, "remark": self.outcome.remark, "error": self.error}
        names = [control.name for control in self.controls]
        has_costs = any(name in pipeline.COST_NAMES for name in names)
        return {"rows": rows, "beside": self.outcome.beside, **told, "costs": has_costs}

    @property
    def drawing(self) -> Spec:
        """The drawing as JSON values: a tag with its specification, or HTML."""
        shown = self._shown
        if isinstance(shown, Comparison):
            return {"tag": "dp-timeline", "spec": timeline_spec(shown.timelines, shown.options)}
        if isinstance(shown, Steps):
            return {"tag": "dp-steps", "spec": shown.to_spec()}
        return {"html": "" if shown is None else shown._repr_html_()}

    @property
    def _shown(self) -> Any:
        shown = self.outcome.drawing
        return Comparison((shown,), {}) if isinstance(shown, Timeline) else shown

    def to_html(self, script: bool = True, key: str = "") -> str:
        """Return the element around drawing and numbers; `key` names the widget that moves it while a kernel runs."""
        names = ", ".join(control.name for control in self.controls)
        spec = {**self.state, "key": key, "how": self.note or _HOW.format(names)}
        shown = self._shown  # its script comes with the element around it
        drawn = shown.to_html(script=False) if isinstance(shown, Comparison | Steps) else self.drawing["html"]
        body = f'<div slot="drawing">{drawn}</div>{self._table()}'
        return element("dp-live", spec, body, script)

    @property
    def note(self) -> str:
        """One sentence that says what is missing for controls, if something is."""
        try:
            import dualpipe_lab.viz.live.widget  # noqa: F401
        except MissingExtra as missing:
            return f"{missing}."
        return ""

    @cached_property
    def widget(self) -> "LiveWidget":
        """The widget, for front ends that show nothing else; raises MissingExtra without ipywidgets."""
        from dualpipe_lab.viz.live.widget import LiveWidget

        return LiveWidget(self)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        is_live = has_kernel() and not self.note
        return {"text/html": self.to_html(key=self.widget.key if is_live else ""), "text/plain": repr(self)}

    def _table(self) -> str:
        def row(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        state = self.state
        body = "".join(row("td", cells) for cells in state["rows"])
        return f"<table>{row('th', ['', 'here', state['beside']])}{body}</table><p>{escape(state['verdict'])}</p>"

    def __str__(self) -> str:
        shown = {control.name: self.values[control.name] for control in self.controls}
        lines = [f"{name} = {value}" for name, value in shown.items() if "\n" not in str(value)]
        state = self.state
        beside = state["beside"]
        rows = [f"{name}: {one}" + (f" ({beside}: {other})" if other else "") for name, one, other in state["rows"]]
        return "\n".join([", ".join(lines), *([self.error] if self.error else [*rows, state["verdict"]])]).rstrip()

    def __repr__(self) -> str:
        return f"<Play of {', '.join(control.name for control in self.controls)}>"


def play(what: Played, per_rank: bool = False, **controls: Any) -> Play:
    """Return a drawing with numbers, closed form and verdict that follow sliders and drop-downs.

    Args:
        what: the name of a schedule or a list of names, of which the reader chooses one; a program or an order of
            `ep.overlap`, whose rows the reader edits; or a function of the controls.  The function returns a program,
            a program and its costs, a drawing, a pair (drawing, numbers by name) or a triple (drawing, numbers,
            verdict).  A number may be a pair: the value and its closed form.
        controls: a slider (low, high) or (low, start, high); a list or a dictionary to choose from; True or False; a
            text; any other value stays fixed.  Schedules, programs and orders have sliders for sizes and costs; state
            others, options of the builder, or fixed values: `num_ranks=4, F=(1, 6), in_flight=(4, 8)`.
        per_rank: of schedules: costs are those of a rank's share of the model, not of one stage.

    Raises:
        ValueError: unknown schedules, controls that are not in order, and start values that are refused.

    >>> print(play("1f1b", num_ranks=(2, 8), num_microbatches=(1, 16)).set(num_microbatches=16))
    num_ranks = 4, num_microbatches = 16, F = 1, I = 1, W = 1, latency = 0
    makespan: 57 ticks (closed form: 57 ticks)
    bubble fraction: 15.8% (closed form: 15.8%)
    peak live activations: 4 on rank 0 (closed form: 4)
    The validator accepts the program: every gradient is computed once, and no rank waits forever.
    """
    if isinstance(what, Program):
        given = {"order": pipeline.order_text(what), **pipeline.COSTS, **controls}
        return Play(pipeline.program_outcome(what), *split_controls(given, pipeline.STARTS))
    if isinstance(what, Order):
        given = {**pipeline.rows_of(what), **pipeline.TICKS, **controls}
        return Play(pipeline.order_outcome(what), *split_controls(given, {}))
    if callable(what):
        return Play(what, *split_controls(controls, {}))
    names = [what] if isinstance(what, str) else list(what)
    for name in names:
        variant(name)  # an unknown one is refused before anything is drawn
    chosen: dict[str, Any] = {"schedule": names} if len(names) > 1 else {}
    found, fixed = split_controls({**chosen, **pipeline.SIZES, **pipeline.COSTS, **controls}, pipeline.STARTS)
    fixed |= {"per_rank": per_rank} if chosen else {"schedule": names[0], "per_rank": per_rank}
    return Play(pipeline.schedule_outcome, found, fixed)
