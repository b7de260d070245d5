"""The timeline as a notebook widget: Python reads and sets its time, its costs and its selection.

Chapter: book/start/time.  In: one to three timelines.  Out: an anywidget, which ipywidgets' controls can be linked to.
The drawing is the one that notebooks show for a timeline.  A widget needs a running kernel: without one, pages of the
book show the static element, and a reopened notebook shows nothing.
"""

from collections.abc import Mapping
from typing import Any

from dualpipe_lab._optional import extra
from dualpipe_lab.timeline import Timeline
from dualpipe_lab.viz.bundle import widget_module
from dualpipe_lab.viz.embed import timeline_html
from dualpipe_lab.viz.spec import timeline_spec

with extra("notebook", "a timeline as a widget"):
    import anywidget
    import traitlets


class TimelineWidget(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget has no types here
    """One to three timelines on one axis, as a notebook widget with traits.

    Attributes:
        time: the position of the playhead, in the timeline's unit; None: at the end.
        costs: the costs of the recomputed timelines, such as {"F": 1, "latency": 2}; {}: as simulated; None: the
            timelines cannot be recomputed.
        selection: the action whose critical path is shown, such as "3F2"; "": none.
        playing: whether it plays; stop it before setting `time`, which the page advances while it plays.

    The page writes the reader's input to these traits: `widget.observe(handler, "time")`.
    """

    _esm = widget_module()
    element = traitlets.Unicode("dp-timeline").tag(sync=True)
    spec = traitlets.Dict().tag(sync=True)
    time = traitlets.Float(None, allow_none=True).tag(sync=True)
    costs = traitlets.Dict(allow_none=True).tag(sync=True)
    selection = traitlets.Unicode("").tag(sync=True)
    playing = traitlets.Bool(False).tag(sync=True)

    def __init__(self, *timelines: Timeline, **traits: Any) -> None:
        self._timelines = timelines
        super().__init__(spec=timeline_spec(timelines), **traits)

    def show(self, *timelines: Timeline) -> None:
        """Replace the timelines; costs, time and selection return to their defaults."""
        self._timelines = timelines
        with self.hold_sync():
            self.set_trait("costs", {})
            self.set_trait("time", None)
            self.selection, self.playing = "", False
            self.spec = timeline_spec(timelines)

    @traitlets.validate("costs")
    def _known_costs(self, proposal: Mapping[str, Any]) -> dict[str, Any] | None:
        costs: dict[str, Any] | None = proposal["value"]
        known = {"F", "I", "W", "B", "overlap", "latency", "transfer"}
        if costs is not None and (strange := set(costs) - known):
            raise traitlets.TraitError(f"costs has no {sorted(strange)[0]!r}; known are {', '.join(sorted(known))}")
        return costs

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Add the static element, which published pages show without a kernel."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**(data or {}), "text/html": timeline_html(*self._timelines)}, metadata
