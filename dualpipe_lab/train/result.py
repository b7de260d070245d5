"""`Result`: what a training returns: its metrics, curve, timeline and, if asked for, its weights.

Chapter: book/whole/training.  In: one row per step.  Out: a table as text, a chart in a notebook.
"""

import os
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dualpipe_lab.dp.checkpoint.reader import Checkpoint
from dualpipe_lab.train.metrics import Metrics, table

if TYPE_CHECKING:
    from dualpipe_lab.timeline import Timeline
    from dualpipe_lab.viz.chart import Chart

_SHOWN = 10  # rows of a printed table


@dataclass
class Result:
    """The result of a training; it prints as a table and displays as a chart.

    Attributes:
        title: the plan, in one line.
        metrics: one row per step of this run; a resumed run begins where the other one ended.
        checkpoint: the last one; None if nothing was saved.
        interrupted: whether it ended before its last step.
        timeline: of the last step; None for one process.
        state: full weights by name, if they were asked for.
        problem: what failed after the first step, and lost a checkpoint; `state` has the weights then.
        gradients: of the first and of the last step, raw, by name; of the reference alone.
    """

    title: str
    metrics: list[Metrics]
    checkpoint: Path | None = None
    interrupted: bool = False
    timeline: "Timeline | None" = None
    state: dict[str, Tensor] | None = None
    problem: str | None = None
    gradients: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Exit code for a script: 0; 1 with a problem; `EX_TEMPFAIL` (75) after an interrupt, for a scheduler."""
        return int(self.problem is not None) or (getattr(os, "EX_TEMPFAIL", 75) if self.interrupted else 0)

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [row.loss for row in self.metrics]

    @property
    def norms(self) -> list[float | None]:
        """The norm of the gradient of each step, before clipping."""
        return [row.norm for row in self.metrics]

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights by name, from memory or the last checkpoint; ValueError if neither was kept."""
        if self.state is not None:
            return self.state
        if self.checkpoint is None:
            raise ValueError("this training kept no weights; run it with weights=True, or with a folder")
        return read_weights(self.checkpoint)

    def chart(self) -> "Chart":
        """Return the curve of the loss, and the evaluations as dots."""
        from dualpipe_lab.viz.chart import Chart  # read when something is shown

        points = [(row.step, row.loss) for row in self.metrics]
        lines: dict[str, Any] = {"training": points}
        evaluations = [(row.step, row.evaluation) for row in self.metrics if row.evaluation is not None]
        if evaluations:
            lines["evaluation"] = evaluations
        return Chart(self._headline(), lines, x="step", y="loss, nats per byte")

    def _headline(self) -> str:
        first, last = self.metrics[0], self.metrics[-1]
        return f"loss {first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step}"

    def __str__(self) -> str:
        if not self.metrics:
            return f"{self.title}: no step"
        rows = self.metrics
        if len(rows) > _SHOWN:  # the first, the last, and some between at equal distances
            rows = [rows[round(i * (len(rows) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]
        ended = [] if self.checkpoint is None else [f"checkpoint: {self.checkpoint}"]
        ended = ["interrupted", *ended] if self.interrupted else ended
        ended += [] if self.problem is None else [f"problem: {self.problem}"]
        return "\n".join([self.title, table(rows), *ended])

    def __repr__(self) -> str:
        return f"<Result of {len(self.metrics)} steps: {self._headline() if self.metrics else 'none'}>"

    def _repr_html_(self) -> str:
        text = f"<pre>{escape(str(self))}</pre>"
        return self.chart()._repr_html_() + text if self.metrics else text


def read_weights(checkpoint: Path | str) -> dict[str, Tensor]:
    """Return the full weights of a checkpoint by their names in the full model."""
    found = Checkpoint(checkpoint)
    return {name.removeprefix("parameter/"): found.read(name) for name in found.names("parameter/")}
