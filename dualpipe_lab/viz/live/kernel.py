"""The widget of an element that asks Python: it carries the element's questions to the kernel, and the answers back.

Chapter: book/pp/studio.  In, out: JSON text, by messages of an anywidget without a view of its own (`live/widget.py`
says how such a model finds its element).
"""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from dualpipe_lab._optional import extra
from dualpipe_lab.viz.bundle import kernel_module

with extra("notebook", "an element that asks the kernel"):
    import anywidget
    import traitlets


class KernelWidget(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget has no types here
    """Answers the questions of the element with this key."""

    _esm = kernel_module()
    key = traitlets.Unicode().tag(sync=True)

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._function = answer
        super().__init__(key=uuid4().hex)
        self.on_msg(self._answer)

    def _answer(self, widget: Any, asked: dict[str, Any], buffers: Any) -> None:
        self.send({"id": asked["id"], "text": self._function(asked["question"])})
