"""`Schedule`: one record of all that is known of a pipeline schedule, beside its builder.

Chapter: book/pp.  In: a builder and closed forms.  Out: what the registry, live cells and tests ask of a schedule.
Each module of schedules ends with its records, so a new schedule is one file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from dualpipe_lab.pp.program import Program


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    A closed form equals the simulator's number exactly, or raises ValueError and says why.  It takes any of the
    arguments `num_ranks`, `num_microbatches`, `rank`, `cost` and the builder's options, by these names.

    Attributes:
        name: in the registry.
        build: from the numbers of ranks and microbatches, and options, to a `Program`.
        makespan: closed form in the cost's ticks; None: there is none.
        peak: most activations, of the rank if it takes one, or of any rank; None: there is no closed form.
        messages: between all ranks in a step; None: there is no closed form.
        is_synchronous: whether one version of the weights computes the gradient of the batch.
        paired: the name of the schedule with the same stages and orders, and overlapped pairs; None: there is none.
    """

    name: str
    build: Callable[..., Program]
    makespan: Callable[..., Any] | None = None
    peak: Callable[..., int] | None = None
    messages: Callable[..., int] | None = None
    is_synchronous: bool = True
    paired: str | None = None

    def value(self, form: Callable[..., Any], **given: Any) -> Any:
        """Call a closed form with those of the given arguments that it takes, and defaults of the builder's options."""
        options = list(signature(self.build).parameters.values())[2:]
        known = {option.name: option.default for option in options} | given
        return form(**{name: known[name] for name in signature(form).parameters if name in known})
