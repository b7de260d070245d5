"""The timeline as a notebook widget: Python reads and sets its time, its costs and what is selected.

Chapter: book/start/time.  In: one to three timelines.  Out: an anywidget, usable beside ipywidgets' controls.
The same drawing as a timeline's own display; use it only where Python has to take part, because a widget needs a
running kernel: the book's pages show the element instead, a notebook that is reopened without its kernel shows nothing.
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
    """One to three timelines on one axis, shared with Python.

    Attributes:
        time: where the playhead is, in the timeline's unit; None: at the end.
        costs: what the page recomputes the timelines with, such as {"F": 1, "latency": 2}; {}: as simulated, None:
            nothing here can be recomputed.
        selection: the action whose critical path is shown, such as "3F2"; "": none.
        playing: whether it plays; as long as it does, only the page moves the time, so stop it before setting one.

    The page sends what the reader does back to these traits: `widget.observe(handler, "time")`.
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
        """Draw other timelines instead, with their own costs and from their end."""
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
        """Add the element, which published pages show where no kernel answers."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**(data or {}), "text/html": timeline_html(*self._timelines)}, metadata
