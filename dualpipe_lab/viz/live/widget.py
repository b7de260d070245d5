"""The widget of a live cell: ipywidgets' sliders and drop-downs, and what follows them.

Chapter: book/pp/gpipe.  In: a `Play`.  Out: an anywidget without a view of its own.
The page's half (`static/live-model.mjs`) starts with the model, not with a view: it finds the element that the cell's
HTML has put on the page, and sets the controls into it.  So the notebook's output is HTML, which needs no widget
manager to be shown again.  JupyterLab makes models without views; front ends that do not (VS Code: not tried) show the
element, and `play(...).widget` as a cell's last line shows the same with the controls.
"""

import asyncio
from typing import Any
from uuid import uuid4

from dualpipe_lab._optional import extra
from dualpipe_lab.viz.bundle import live_module
from dualpipe_lab.viz.live.pipeline import Choice, Control, Slider, Toggle

with extra("notebook", "a live cell with controls"):
    import anywidget
    import ipywidgets  # type: ignore[import-untyped]
    import traitlets

_COLUMNS = "repeat(auto-fill, minmax(min(26em, 100%), 1fr))"
DELAY = 0.1  # seconds without a change until the numbers follow


class LiveWidget(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget has no types here
    """The controls of a live cell (a box of ipywidgets), the name of its element, and the state that it shows."""

    _esm = live_module()
    key = traitlets.Unicode().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    controls = traitlets.Instance(ipywidgets.Box).tag(sync=True, **ipywidgets.widget_serialization)

    def __init__(self, play: Any) -> None:  # a `Play`, whose file imports this one
        self._play = play
        self._timer: asyncio.TimerHandle | None = None
        self._inputs = {control.name: _input(control) for control in play.controls}
        box = ipywidgets.GridBox([*self._inputs.values()], layout={"grid_template_columns": _COLUMNS})
        super().__init__(key=uuid4().hex, controls=box, state=self._now())
        for one in self._inputs.values():
            one.observe(lambda _: self._later(), "value")

    def _now(self) -> dict[str, Any]:
        return {**self._play.state, "drawing": self._play.drawing}

    def _later(self) -> None:
        """Follow the controls once they rest; without an event loop at once."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._follow()
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(DELAY, self._follow)

    def _follow(self) -> None:
        self._play.set(**{name: one.value for name, one in self._inputs.items()})
        self.state = self._now()


def _input(control: Control) -> Any:
    style = {"description_width": "min(11em, 45%)"}
    about: dict[str, Any] = {"description": control.name, "style": style, "layout": {"width": "auto"}}
    if isinstance(control, Slider):
        return ipywidgets.IntSlider(control.start, control.low, control.high, **about)
    if isinstance(control, Choice):
        return ipywidgets.Dropdown(options=control.options, value=control.start, **about)
    if isinstance(control, Toggle):
        return ipywidgets.Checkbox(control.start, **about)
    about |= {"layout": {"width": "auto", "grid_area": "auto / 1 / auto / -1"}, "style": {"description_width": "6em"}}
    if "\n" in control.start:
        return ipywidgets.Textarea(control.start, rows=1 + control.start.count("\n"), **about)
    return ipywidgets.Text(control.start, **about)
