"""`play`: one line in a cell, for a drawing whose numbers, verdict and closed form follow sliders and drop-downs.

Chapter: book/pp/gpipe.  In: schedules, a program, or a function of what the reader changes.  Out: HTML, and a widget.
Without a kernel, in published pages and exports, the HTML holds what the controls show at each of their values: Python
computes all points of this grid, and the element chooses one.  Costs of a schedule or a program are no controls there,
because its drawing has sliders of its own for them.  Rows that the reader edits are no grid: the element asks a page's
Python (`answer`), where the page has one.
A running notebook puts the ipywidgets into the HTML (`live.widget`); the saved output holds none, so that JupyterLab
has no widget to miss.
Elsewhere: `ipywidgets.interact`, whose output a published page does not show.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from html import escape
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_lab._optional import MissingExtra
from dualpipe_lab.ep.overlap.order import Order
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules.variants import variant
from dualpipe_lab.timeline import Timeline
from dualpipe_lab.viz.embed import Comparison, Spec, element, has_kernel, packed, table, timeline_spec
from dualpipe_lab.viz.live import pipeline
from dualpipe_lab.viz.live.pipeline import Choice, Control, Slider, Text, split_controls, words_of
from dualpipe_lab.viz.steplog import Steps

if TYPE_CHECKING:
    from dualpipe_lab.viz.live.widget import LiveWidget

Played: TypeAlias = str | Sequence[str] | Program | Order | Callable[..., Any]

MOST_POINTS = 2_000  # of a grid: more would make a page heavy and slow to build
_HOW = "Run this cell to get its controls: {}."


class Play:
    """A drawing with numbers that follow controls; the result of `play`.

    Attributes:
        controls: what the reader changes.
        values: the current values by name.
        outcome: drawing, numbers and verdict of the latest values that were not refused.
        error: one sentence if the current values are refused, otherwise "".
    """

    def __init__(
        self,
        function: Callable[..., Any],
        controls: Sequence[Control],
        fixed: Mapping[str, Any],
        given: Spec | None = None,
    ) -> None:
        self.controls, self.error, self._given = list(controls), "", given or {}
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
        has_costs = any(control.name in pipeline.COST_NAMES for control in self.controls)
        return {**_told(self.outcome), "error": self.error, "costs": has_costs}

    @property
    def drawing(self) -> Spec:
        """The drawing as JSON values: a tag with its specification, or HTML."""
        return _drawn(self.outcome)

    @property
    def grid(self) -> Spec:
        """What the page's controls show at all of their values; empty without controls of few values."""
        texts = [control for control in self.controls if isinstance(control, Text)]
        offered = [control for control in self.controls if control not in texts and not self._is_cost(control)]
        axes = [_axis(control) for control in offered]
        if not offered + texts or (texts and not self._given) or prod(map(len, axes)) > MOST_POINTS:
            return {}
        names = [control.name for control in offered]
        grid = [dict(zip(names, values, strict=True)) for values in product(*axes)]
        points = packed([_point(self._function, {**self.values, **values}) for values in grid])
        rows = {"texts": [one.name for one in texts], "asks": {**self._given, "values": self.values}} if texts else {}
        return {"controls": [_offer(*each) for each in zip(offered, axes, strict=True)], "points": points, **rows}

    def _is_cost(self, control: Control) -> bool:
        is_pipeline = self._function is pipeline.schedule_outcome or "program" in self._given
        return is_pipeline and control.name in pipeline.COST_NAMES

    def to_html(self, script: bool = True, key: str = "") -> str:
        """Return the element around drawing and numbers; `key` names the widget that moves it while a kernel runs."""
        grid = {} if key else self.grid
        names = ", ".join(grid.get("texts", [] if grid else [control.name for control in self.controls]))
        how = (self.note or _HOW.format(names)) if names else ""
        spec = {**self.state, "key": key, "how": how, **grid}
        shown = _shown(self.outcome)  # its script comes with the element around it
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
        state = self.state
        return table(["", "here", state["beside"]], state["rows"]) + f"<p>{escape(state['verdict'])}</p>"

    def __str__(self) -> str:
        shown = {control.name: self.values[control.name] for control in self.controls}
        lines = [f"{name} = {value}" for name, value in shown.items() if "\n" not in str(value)]
        state = self.state
        beside = state["beside"]
        rows = [f"{name}: {one}" + (f" ({beside}: {other})" if other else "") for name, one, other in state["rows"]]
        return "\n".join([", ".join(lines), *([self.error] if self.error else [*rows, state["verdict"]])]).rstrip()

    def __repr__(self) -> str:
        return f"<Play of {', '.join(control.name for control in self.controls)}>"


def _told(outcome: pipeline.Outcome) -> Spec:
    pairs = [value if isinstance(value, tuple) else (value, "") for value in outcome.numbers.values()]
    rows = [[name, *map(words_of, pair)] for name, pair in zip(outcome.numbers, pairs, strict=True)]
    return {"rows": rows, "beside": outcome.beside, "verdict": outcome.verdict, "remark": outcome.remark}


def _shown(outcome: pipeline.Outcome) -> Any:
    shown = outcome.drawing
    return Comparison((shown,), {}) if isinstance(shown, Timeline) else shown


def _drawn(outcome: pipeline.Outcome) -> Spec:
    shown = _shown(outcome)
    if isinstance(shown, Comparison):
        return {"tag": "dp-timeline", "spec": timeline_spec(shown.timelines, shown.options)}
    if isinstance(shown, Steps):
        return {"tag": "dp-steps", "spec": shown.to_spec()}
    return {"html": "" if shown is None else shown._repr_html_()}


def _point(function: Callable[..., Any], values: Mapping[str, Any]) -> Spec:
    try:
        outcome = pipeline.outcome_of(function(**values))
    except Exception as error:
        return {"error": pipeline.sentence(error)}
    return {**_told(outcome), "drawing": _drawn(outcome)}


def answer(question: str) -> str:
    """Return as JSON what a page shows for rows that its reader has edited; the question is the `asks` of `grid`."""
    asked = json.loads(question)
    if "program" in asked:
        function = pipeline.program_outcome(Program.parse(*asked["program"]))
    else:
        function = pipeline.order_outcome(Order.parse(*asked["order"]))
    return json.dumps(_point(function, asked["values"]))


def _axis(control: Control) -> list[Any]:
    """Return all values of a control that has an end of them."""
    if isinstance(control, Slider):
        return list(range(control.low, control.high + 1))
    return list(control.options.values()) if isinstance(control, Choice) else [False, True]


def _offer(control: Control, axis: Sequence[Any]) -> Spec:
    words = list(control.options) if isinstance(control, Choice) else [words_of(value) for value in axis]
    is_slider = isinstance(control, Slider)
    return {"name": control.name, "words": words, "start": axis.index(control.start), "slider": is_slider}


def play(what: Played, per_rank: bool = False, **controls: Any) -> Play:
    """Return a drawing with numbers, closed form and verdict that follow sliders and drop-downs.

    Without a kernel the page holds all points of the controls' grid, if there are at most 2,000.

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
        asks: Spec = {"program": [what.name, what.rows()]}
        return Play(pipeline.program_outcome(what), *split_controls(given, pipeline.STARTS), asks)
    if isinstance(what, Order):
        given = {**pipeline.rows_of(what), **pipeline.TICKS, **controls}
        asks = {"order": [what.name, *pipeline.rows_of(what).values(), what.forward, what.backward]}
        return Play(pipeline.order_outcome(what), *split_controls(given, {}), asks)
    if callable(what):
        return Play(what, *split_controls(controls, {}))
    names = [what] if isinstance(what, str) else list(what)
    for name in names:
        variant(name)  # an unknown one is refused before anything is drawn
    chosen: dict[str, Any] = {"schedule": names} if len(names) > 1 else {}
    found, fixed = split_controls({**chosen, **pipeline.SIZES, **pipeline.COSTS, **controls}, pipeline.STARTS)
    fixed |= {"per_rank": per_rank} if chosen else {"schedule": names[0], "per_rank": per_rank}
    return Play(pipeline.schedule_outcome, found, fixed)
