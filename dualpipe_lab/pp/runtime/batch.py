"""The data and the results of one step, by microbatch.

In: inputs, targets, shares of the loss.  Out: losses and counts.
  share of a microbatch   its tokens over all tokens of the batch; 1 / M only where all are equal.  The loss is scaled
                          by the share before its backward, so gradients need no division afterwards
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dualpipe_lab.pp.runtime.stage import Tensors, as_tensors, has_gradient, names_of, tensors_in

Extra = Mapping[int, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class StepResult:
    """The losses and peaks of one step; the gradients are in the parameters.

    Attributes:
        loss: of the whole batch, as one process computes it: the sum of `losses`.  As in torch's pipelining, the rank
            of the last stage has it, and no message brings it to the others, which have None.  So have the ranks of
            DualPipe, each of whose ends has the losses of one direction: all-reduce the sum of `losses` there.  What
            earlier stages add (`WithLoss`) is not in it.
        losses: the weighted loss of each microbatch whose last stage is on this rank; their sum over all ranks, with
            the stage losses, is the loss of the batch.
        peak_activations: the most microbatches, summed over this rank's stages, whose activations were held at once.
        peak_buffers: the most messages for which receive buffers were allocated at once.
        stage_losses: by (stage, microbatch), the weighted losses that earlier stages returned (`WithLoss`).
    """

    loss: Tensor | None
    losses: dict[int, Tensor]
    peak_activations: int
    peak_buffers: int
    stage_losses: dict[tuple[int, int], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """The losses or outputs of a step without backwards.

    Attributes:
        loss: of the whole batch, if there were targets; on the rank of the last stage, as that of a `StepResult`.
        losses: the weighted loss of each microbatch whose last stage is on this rank, if there were targets.
        outputs: otherwise, the outputs of the last stage, by microbatch.
    """

    loss: Tensor | None
    losses: dict[int, Tensor]
    outputs: dict[int, Tensor | Tensors | dict[str, Tensor]]


@dataclass
class Microbatches:
    """The microbatches of one step, and the results as they are made."""

    inputs: Sequence[Any]
    targets: Sequence[Any] | None
    weights: Sequence[float]
    extra: Extra
    losses: dict[int, Tensor] = field(default_factory=dict)
    stage_losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor | Tensors | dict[str, Tensor]] = field(default_factory=dict)
    peak: int = 0

    @property
    def loss(self) -> Tensor | None:
        """The loss of the whole batch; None unless this rank has the loss of every microbatch."""
        return torch.stack([*self.losses.values()]).sum() if len(self.losses) == len(self.weights) else None

    def input(self, microbatch: int) -> Tensors:
        """Return the tensors that enter the first stage."""
        if self.inputs[microbatch] is None:
            raise ValueError("this rank of the pipeline holds stage 0, which needs inputs, got None; give them to it")
        return as_tensors(f"microbatch {microbatch}", self.inputs[microbatch], "be")

    def extra_of(self, stage: int, microbatch: int) -> Mapping[str, Any]:
        """Return the extra keyword arguments of one stage."""
        return self.extra[stage][microbatch] if stage in self.extra else {}

    def input_shapes(self, microbatch: int) -> tuple[Any, ...]:
        """Return shapes and types of the tensors that enter the first stage; they decide what crosses boundaries."""
        more = [value for value in self.extra_of(0, microbatch).values() if isinstance(value, Tensor)]
        tensors = self.input(microbatch)
        shapes = tuple((tuple(value.shape), value.dtype) for value in (*tensors, *more))
        return *shapes, *names_of(tensors)


def make_batch(
    name: str,
    number: int,
    inputs: Any,
    targets: Any,
    weights: Sequence[float] | None,
    extra: Extra | None,
) -> Microbatches:
    """Return the microbatches of a batch; ValueError if an argument does not fit the microbatches of a program."""
    shares = weights if weights is not None else [1 / number] * number
    is_whole = isinstance(inputs, Tensor | Mapping) or isinstance(targets, Tensor | Mapping)
    inputs, targets = (_microbatches(each, number, is_whole) for each in (inputs, targets))
    given = {"inputs": inputs, "targets": targets, "weights": shares}
    given |= {f"extra inputs of stage {stage}": values for stage, values in (extra or {}).items()}
    for what, values in given.items():
        if values is not None and len(values) != number:
            raise ValueError(f"{name} needs {number} {what}, one per microbatch, got {len(values)}")
    if weights is None:
        found = [target for target in targets or () if tensors_in(target)]  # a rank may have some of them only
        shapes = [[tuple(y.shape) for y in tensors_in(target)] for target in found]
        counts = [*map(num_elements, found)]
        if any(shape != shapes[0] for shape in shapes) or len(set(counts)) > 1:
            raise ValueError(
                "the mean over microbatches of several sizes is not the mean over the batch, got targets of "
                f"{', '.join(map(str, counts))} elements; give step the share of each microbatch in the loss as "
                "weights, such as its elements over those of all (a class of -100 is none: torch's loss leaves it out)"
            )
    return Microbatches([None] * number if inputs is None else inputs, targets, shares, extra or {})


def _microbatches(given: Any, number: int, is_whole: bool) -> Any:
    """Split what is a batch: a tuple is one beside another batch, and unless it has one entry per microbatch."""
    is_batch = isinstance(given, tuple) and (is_whole or len(given) != number)
    return split_batch(given, number) if is_batch or isinstance(given, Tensor | Mapping) else given


def num_elements(target: Any) -> int:
    """Return how many elements of a microbatch's target count in a mean: all but the class -100."""
    return sum(y.numel() if has_gradient(y) else int((y != -100).sum()) for y in tensors_in(target))


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split a batch along its first dimension into equal microbatches.

    Args:
        batch: a tensor, or tensors in a tuple, list or dictionary, which may be nested: every tensor is split.
        num_microbatches: their number.

    Raises:
        ValueError: if the rows do not split into these microbatches, or the tensors have no rows, or unequal ones.

    >>> import torch
    >>> [len(rows) for rows in split_batch(torch.zeros(10, 3), 5)]
    [2, 2, 2, 2, 2]
    """
    counts = set(_rows_in(batch))
    if len(counts) != 1:
        raise ValueError(f"the tensors of a batch have one number of rows, got {sorted(counts)}; give each all rows")
    rows = counts.pop()
    if num_microbatches < 1 or num_microbatches > rows or rows % num_microbatches:
        fitting = ", ".join(str(number) for number in range(1, rows + 1) if rows % number == 0)
        raise ValueError(
            f"a batch of {rows} rows does not split into {num_microbatches} equal microbatches; use "
            f"{fitting or 'a batch that has rows'}"
        )
    size = rows // num_microbatches
    return [_rows_of(batch, first, size) for first in range(0, rows, size)]


def _rows_in(batch: Any) -> Iterator[int]:
    if isinstance(batch, Mapping | tuple | list):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _rows_in(each)
    elif isinstance(batch, Tensor) and batch.dim():
        yield len(batch)
    else:
        what = "a tensor of shape ()" if isinstance(batch, Tensor) else type(batch).__name__
        raise ValueError(
            f"a batch is split along the first dimension of its tensors, and {what} has none; give tensors with a row "
            "for each sample, or a list with one entry per microbatch"
        )


def _rows_of(batch: Any, first: int, count: int) -> Any:
    if isinstance(batch, Tensor):
        return batch.narrow(0, first, count)
    if isinstance(batch, Mapping):
        return {name: _rows_of(each, first, count) for name, each in batch.items()}
    parts = [_rows_of(each, first, count) for each in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
