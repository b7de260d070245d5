"""The data and the results of one step, by microbatch.

In: inputs, targets, shares of the loss.  Out: losses and counts.
  share of a microbatch   its tokens over all tokens of the batch; 1 / M only where all are equal.  The loss is scaled
                          by the share before its backward, so gradients need no division afterwards
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dualpipe_lab.pp.runtime.stage import Tensors, as_tensors, names_of, tensors_in

Extra = Mapping[int, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class StepResult:
    """The losses and peaks of one step; the gradients are in the parameters.

    Attributes:
        losses: the weighted loss of each microbatch whose last stage is on this rank; their sum over all ranks, with
            the stage losses, is the loss of the batch.
        peak_activations: the most microbatches, summed over this rank's stages, whose activations were held at once.
        peak_buffers: the most messages for which receive buffers were allocated at once.
        stage_losses: by (stage, microbatch), the weighted losses that earlier stages returned (`WithLoss`).
    """

    losses: dict[int, Tensor]
    peak_activations: int
    peak_buffers: int
    stage_losses: dict[tuple[int, int], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """The losses or outputs of a step without backwards.

    Attributes:
        losses: the weighted loss of each microbatch whose last stage is on this rank, if there were targets.
        outputs: otherwise, the outputs of the last stage, by microbatch.
    """

    losses: dict[int, Tensor]
    outputs: dict[int, Tensor | Tensors | dict[str, Tensor]]


@dataclass
class Batch:
    """The microbatches of one step, and the results as they are made."""

    inputs: Sequence[Any]
    targets: Sequence[Any] | None
    weights: Sequence[float]
    extra: Extra
    losses: dict[int, Tensor] = field(default_factory=dict)
    stage_losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor | Tensors | dict[str, Tensor]] = field(default_factory=dict)
    peak: int = 0

    def input(self, microbatch: int) -> Tensors:
        """Return the tensors that enter the first stage."""
        return as_tensors(0, self.inputs[microbatch])

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
    inputs: Sequence[Any],
    targets: Sequence[Any] | None,
    weights: Sequence[float] | None,
    extra: Extra | None,
) -> Batch:
    """Return the batch; ValueError if an argument does not fit the microbatches of a program."""
    shares = weights if weights is not None else [1 / number] * number
    given = {"inputs": inputs, "targets": targets if targets is not None else inputs, "weights": shares}
    given |= {f"extra inputs of stage {stage}": values for stage, values in (extra or {}).items()}
    for what, values in given.items():
        if len(values) != number:
            raise ValueError(f"{name} needs {number} {what}, one per microbatch, got {len(values)}")
    if weights is None:
        _check_equal(targets or ())
    return Batch(inputs, targets, shares, extra or {})


def _check_equal(targets: Sequence[Any]) -> None:
    found = [tensors for target in targets if (tensors := tensors_in(target))]  # a rank may have some of them only
    shapes = [[tuple(y.shape) for y in tensors] for tensors in found]
    if any(shape != shapes[0] for shape in shapes):
        sizes = ", ".join(str(sum(y.numel() for y in tensors)) for tensors in found)
        raise ValueError(
            "the mean over microbatches of several sizes is not the mean over the batch, got targets of "
            f"{sizes} elements; give step the share of each microbatch in the loss as weights, such as its elements "
            "over those of all"
        )


def split_batch(batch: Tensor, num_microbatches: int) -> list[Tensor]:
    """Split a batch along its first dimension into equal microbatches.

    Raises:
        ValueError: if the rows do not split into these microbatches; the message lists the numbers that fit.

    >>> import torch
    >>> [len(rows) for rows in split_batch(torch.zeros(10, 3), 5)]
    [2, 2, 2, 2, 2]
    """
    rows = len(batch)
    if num_microbatches < 1 or num_microbatches > rows or rows % num_microbatches:
        fitting = ", ".join(str(number) for number in range(1, rows + 1) if rows % number == 0)
        raise ValueError(
            f"a batch of {rows} rows does not split into {num_microbatches} equal microbatches; use "
            f"{fitting or 'a batch that has rows'}"
        )
    return list(batch.chunk(num_microbatches))
