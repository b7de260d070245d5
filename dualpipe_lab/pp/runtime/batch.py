"""The data and the results of one step, by microbatch.

In: inputs, targets, shares of the loss.  Out: losses and counts.
  share of a microbatch   its tokens over all tokens of the batch; 1 / M only where all are equal.  The loss is scaled
                          by the share before its backward, so gradients need no division afterwards
  (sum, count)            a loss that is a mean over something else; the counts follow from the targets, so those of the
                          microbatches to come are asked for at the first one
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dualpipe_lab.pp.runtime.stage import Tensors, as_tensors, has_gradient, names_of, tensors_in

DIGEST_VALUES = 256  # of a tensor: other samples differ in most of them
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
    among: Sequence[Any] | None = None  # all targets that the shares were computed from; None: the shares were given
    counts: list[float] | None = None  # of these, where the loss function returns (sum, count)
    read: dict[int, Tensors] = field(default_factory=dict)  # the inputs as tuples of tensors
    losses: dict[int, Tensor] = field(default_factory=dict)
    stage_losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor | Tensors | dict[str, Tensor]] = field(default_factory=dict)
    peak: int = 0

    @property
    def loss(self) -> Tensor | None:
        """The loss of the whole batch; None unless this rank has the loss of every microbatch."""
        return torch.stack([*self.losses.values()]).sum() if len(self.losses) == len(self.weights) else None

    def input(self, microbatch: int) -> Tensors:
        """Return the tensors that enter the first stage; ValueError for one whose gradient no rank computes."""
        if microbatch not in self.read:
            if self.inputs[microbatch] is None:
                raise ValueError(
                    "this rank of the pipeline holds stage 0, which needs inputs, got None; give them to it"
                )
            self.read[microbatch] = tensors = as_tensors(f"microbatch {microbatch}", self.inputs[microbatch], "be")
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                raise ValueError(
                    f"the inputs of microbatch {microbatch} need a gradient, and a pipeline computes none for its "
                    "inputs; move what makes them into stage 0, or detach() them"
                )
        return self.read[microbatch]

    def digests(self, microbatch: int, num_bits: int) -> tuple[int, int]:
        """Return a number for the inputs of a microbatch and one for its targets; 0 for what is not here.

        It follows from the shapes of the tensors and, on the CPU, from some of their values.
        """
        found = [0, 0]
        for place, given in enumerate((self.inputs, self.targets)):
            for tensor in () if given is None else tensors_in(given[microbatch]):
                found[place] = crc32(repr(tuple(tensor.shape)).encode(), found[place])
                if tensor.is_cpu and tensor.layout is torch.strided:
                    found[place] = checksum(tensor, found[place], DIGEST_VALUES)
        return found[0] % (1 << num_bits), found[1] % (1 << num_bits)

    def extra_of(self, stage: int, microbatch: int) -> Mapping[str, Any]:
        """Return the extra keyword arguments of one stage."""
        return self.extra[stage][microbatch] if stage in self.extra else {}

    def input_shapes(self, microbatch: int) -> tuple[Any, ...]:
        """Return shapes and types of the tensors that enter the first stage; they decide what crosses boundaries."""
        tensors = self.input(microbatch)
        more = tensors_in(self.extra[0][microbatch]) if 0 in self.extra else ()
        return *[(value.shape, value.dtype) for value in (*tensors, *more)], *names_of(tensors)


def checksum(tensor: Tensor, found: int = 0, most: int = 0) -> int:
    """Return the CRC of a tensor's bits, behind those of `found`: of all values, or of about `most` of them."""
    values = tensor.detach().flatten()
    values = values[:: max(1, len(values) // most)] if most else values
    return crc32(values.cpu().contiguous().view(torch.uint8).numpy(), found)


def make_batch(
    name: str,
    number: int,
    inputs: Any,
    targets: Any,
    weights: "Sequence[float] | SharesAmong | None",
    extra: Extra | None,
    reduce: str = "mean",
) -> Microbatches:
    """Return the microbatches of a batch; ValueError if an argument does not fit the microbatches of a program."""
    if reduce not in ("mean", "sum") or (weights is not None and reduce == "sum"):
        raise ValueError(
            f'the loss of a batch is the "mean" of its microbatches\' or their "sum", got reduce={reduce!r}'
            f"{'' if weights is None else ' and weights, which are their shares'}; give one of them"
        )
    weights = [1.0] * number if reduce == "sum" else weights
    is_whole = isinstance(inputs, Tensor | Mapping) or isinstance(targets, Tensor | Mapping)
    inputs, targets = (_microbatches(each, number, is_whole) for each in (inputs, targets))
    among: Sequence[Any] | None = weights.targets if isinstance(weights, SharesAmong) else targets or [None] * number
    given: dict[str, Any] = {"inputs": inputs, "targets": targets}
    given["weights"] = None if isinstance(weights, SharesAmong) else weights
    given |= {f"extra inputs of stage {stage}": values for stage, values in (extra or {}).items()}
    for what, values in given.items():
        if values is not None and not hasattr(values, "__len__"):
            raise ValueError(
                f"{name} needs {number} {what}, one per microbatch, got a {type(values).__name__}; give a list"
            )
        if values is not None and len(values) != number:
            remedy = "; the fields of one batch go in a tuple" if isinstance(values, list) and what == "inputs" else ""
            raise ValueError(f"{name} needs {number} {what}, one per microbatch, got {len(values)}{remedy}")
    if weights is None or isinstance(weights, SharesAmong):
        assert among is not None
        shares: Sequence[float] = _shares(targets or [None] * number, among)
    else:
        shares, among = weights, None
    return Microbatches([None] * number if inputs is None else inputs, targets, shares, extra or {}, among)


@dataclass(frozen=True)
class SharesAmong:
    """In place of weights: each microbatch's share of the mean over these targets, those of all data ranks."""

    targets: Sequence[Any]


def _shares(targets: Sequence[Any], among: Sequence[Any]) -> list[float]:
    """Return each microbatch's share of the elements of all; equal where this rank has no targets."""
    known = [target for target in among if isinstance(target, Tensor) or tensors_in(target)]
    counts = [num_elements(target) for target in known]
    if len(set(counts)) <= 1 and (len(known) in (0, len(among)) or counts[0] == _numel(known[0])):
        return [1 / len(among)] * len(targets)
    if len(known) < len(among):
        raise ValueError(
            f"{len(known)} of {len(among)} microbatches have targets on this rank, of {', '.join(map(str, counts))} "
            "elements (a class of -100 is none), so their shares of the batch are unknown; give all targets on every "
            "rank that holds the last stage, or the shares as weights"
        )
    return [num_elements(target) / max(sum(counts), 1) for target in targets]


def _numel(target: Any) -> int:
    return sum(y.numel() for y in tensors_in(target))


def mean_loss(
    loss_fn: Callable[..., Any], batch: Microbatches, microbatch: int, outputs: Sequence[Any], compares: bool
) -> Any:
    """Return what times the share of a microbatch is its part of the loss of the batch; usually its mean.

    Raises:
        ValueError: the loss function returns (sum, count), and the counts of the batch do not follow from its targets;
            `compares`, and the loss of the microbatch is not that of its halves.
    """
    target = None if batch.targets is None else batch.targets[microbatch]
    loss = loss_fn(*outputs, target)
    if compares and batch.weights[microbatch] and batch.among is not None and len(batch.among) > 1:
        _check_halves(loss_fn, loss, outputs, target)
    if not isinstance(loss, tuple):
        return loss
    total, count = loss[0], float(loss[1])
    share = batch.weights[microbatch]
    if batch.among is None or not (share or count):
        return total / count if count else total
    if batch.counts is None:
        shape = [tuple(y.shape) for y in tensors_in(target)]
        if not share or any([tuple(y.shape) for y in tensors_in(each)] != shape for each in batch.among):
            raise ValueError(
                "the counts of a loss that returns (sum, count) are computed before the outputs of most microbatches "
                f"are here, for targets of one shape, got {shape} and others; give all targets, in equal microbatches, "
                "or the shares of the microbatches as weights"
            )
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            batch.counts = [float(loss_fn(*outputs, each)[1]) for each in batch.among]
    if count not in batch.counts:
        raise ValueError(
            f"the loss function returned a count of {count:g} for microbatch {microbatch}, and counts "
            f"{', '.join(f'{each:g}' for each in batch.counts)} for the targets of the batch before; a count follows "
            "from the target alone, so that shares are known before the outputs are"
        )
    return total / (sum(batch.counts) * share)


def _check_halves(loss_fn: Callable[..., Any], loss: Any, outputs: Sequence[Any], target: Any) -> None:
    """Raise ValueError unless a loss is the mean of its halves, by the elements of their targets, or their sum."""
    try:
        rows = {*_rows_in([*outputs, *([] if target is None else [target])])}
    except ValueError:
        return  # something without rows
    total = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(total, Tensor) or total.numel() != 1 or len(rows) != 1 or (number := rows.pop()) < 2:
        return
    halves, counts = [], []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for first, count in ((0, number // 2), (number // 2, number - number // 2)):
            goal = None if target is None else _rows_of(target, first, count)
            counts.append(count if target is None else num_elements(goal))
            try:
                found = loss_fn(*(_rows_of(y, first, count) for y in outputs), goal) if counts[-1] else 0.0
            except Exception:  # a loss function of one batch size
                return
            halves.append(float(found[0] if isinstance(found, tuple) else found))
    whole, parts = float(total.detach()), halves
    is_pair = isinstance(loss, tuple)
    if not is_pair:
        parts = [half * count / max(sum(counts), 1) for half, count in zip(halves, counts, strict=True)]
    bound = torch.finfo(total.dtype).eps ** 0.5 * max(abs(whole), *map(abs, parts))
    if isfinite(whole) and not abs(whole - sum(parts)) <= bound:  # a half may be no number
        raise ValueError(
            f"the {'sum' if is_pair else 'loss'} of a microbatch is {whole:.6g}, and {sum(parts):.6g} as the "
            f"{'sum' if is_pair else 'mean'} over its halves, so microbatches would make another loss than the batch "
            "(a sum, class weights, a mask, an ignore_index other than -100, or samples that depend on each other); "
            "return (sum, count) from the loss function, or give the share of each microbatch as weights"
        )


def _microbatches(given: Any, number: int, is_whole: bool) -> Any:
    """Split what is a batch: a tuple is one beside another batch, and unless it has one entry per microbatch."""
    is_batch = isinstance(given, tuple) and (is_whole or len(given) != number)
    return split_batch(given, number) if is_batch or isinstance(given, Tensor | Mapping) else given


def num_elements(target: Any) -> int:
    """Return how many elements of a microbatch's target count in a mean: all but the class -100."""
    if not isinstance(target, Tensor):
        return sum(map(num_elements, tensors_in(target)))
    return target.numel() if has_gradient(target) else int((target != -100).sum())


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
