"""Judging sums of gradients: their values, buffers and number, and when each was under way on the virtual clock.

Every layer's backward takes 10 ms of model time, so that a sum that starts too late, or too early, is seen exactly.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.dp.shares import LIBRARY
from dualpipe_course.exercise import Wrong
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_lab.world.emulate.link import Link
from dualpipe_lab.world.launcher import Results

if TYPE_CHECKING:
    from torch import Tensor, nn

BACKWARD, MS = 10, 1_000_000  # ms of each layer; nanoseconds
SIZES = (4, 8, 4, 16, 8)  # elements of each layer's weight, in float64
LINK = Link(gbps=0.001)  # 125 bytes take a millisecond
NUM_STEPS = 2


class Found(NamedTuple):
    """What one rank found: gradients, how many buffers they lie in before and after, when each step began, in ns."""

    grads: list[list[float]]
    num_buffers: tuple[int, int]
    began: list[int]


def check_buckets(fn: Callable[..., Any], num_ranks: int, bucket_bytes: int, rare: int | None) -> None:
    """Raise `Wrong` unless `fn(parameters, bucket_bytes)` sums in buckets, during the backward, in one order.

    Where `rare` is a layer, rank 0 does not use it: buckets behind that one are complete there, and must not overtake.
    """
    case = f"{num_ranks} rank(s), buckets of {bucket_bytes} bytes"
    case += "" if rare is None else f", layer {rare} not used by rank 0"
    answer = Without(fn, *LIBRARY)
    results = on_ranks(_buckets, num_ranks, answer, bucket_bytes, rare, case=case, clock="virtual", link=LINK)
    buckets = expected_buckets(bucket_bytes)
    _check_count(results, len(buckets), case, f"buckets of layers {buckets}, the last layer first")
    _check_waits(results, len(buckets), case)
    _check_values(results, 1, rare, case)
    for rank, found in enumerate(results):
        if set(found.num_buffers) != {len(buckets)}:
            before, after = found.num_buffers
            raise Wrong(
                f"{case}: on rank {rank} the gradients lie in {before} buffer(s) before the backward and {after} after "
                f"it, expected {len(buckets)}: each .grad is a view of its bucket from the beginning to the end"
            )
    incomplete = next((i for i, bucket in enumerate(buckets) if rare in bucket), len(buckets))
    ready = [(len(SIZES) - min(bucket)) * BACKWARD for bucket in buckets[:incomplete]]
    ready += [len(SIZES) * BACKWARD] * (len(buckets) - incomplete)  # in finish(), after the backward
    _check_moments(results, ready, case)


def check_once(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless `fn(parameters, num_microbatches)` sums each gradient once a step, in the last backward."""
    case = f"{num_ranks} rank(s), {num_microbatches} microbatch(es), {NUM_STEPS} steps"
    answer = Without(fn, *LIBRARY)
    results = on_ranks(_once, num_ranks, answer, num_microbatches, case=case, clock="virtual", link=LINK)
    _check_count(results, NUM_STEPS * len(SIZES), case, "one for each trained parameter and step")
    _check_waits(results, NUM_STEPS * len(SIZES), case)
    earlier = (num_microbatches - 1) * len(SIZES)
    _check_moments(results, [(earlier + 1 + place) * BACKWARD for place in range(len(SIZES))], case)
    _check_values(results, num_microbatches, None, case)  # a sum that starts early may still meet the right numbers


def expected_buckets(bucket_bytes: int) -> list[list[int]]:
    """The layers of each bucket: neighbours share one while it stays within its size.

    >>> expected_buckets(128), expected_buckets(10_000)  # layers 2, 1 and 0 have exactly 128 bytes
    ([[4], [3], [2, 1, 0]], [[4, 3, 2, 1, 0]])
    """
    buckets: list[list[int]] = []
    held = bucket_bytes
    for layer in reversed(range(len(SIZES))):
        if held + 8 * SIZES[layer] > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(layer)
        held += 8 * SIZES[layer]
    return buckets


def _check_count(results: Results, expected: int, case: str, what: str) -> None:
    for rank in range(len(results)):
        count = results.ledger.count("all_reduce", rank)
        if count != expected:
            raise Wrong(f"{case}: rank {rank} made {count} all-reduces, expected {expected}: {what}")


def _check_waits(results: Results, expected: int, case: str) -> None:
    for rank, spans in enumerate(results.collectives if len(results) > 1 else []):
        waited = sum(span.label == "all_reduce" for span in spans)
        if waited < expected:
            raise Wrong(f"{case}: finish() on rank {rank} waited for {waited} of {expected} sums; it must wait for all")


def _check_values(results: Results, num_microbatches: int, rare: int | None, case: str) -> None:
    num_ranks = len(results)
    for layer in range(len(SIZES)):
        owners = range(1, num_ranks) if layer == rare else range(num_ranks)
        parts = [_gradient(layer, rank, m) for rank in owners for m in range(num_microbatches)]
        expected = [sum(column) for column in zip(*parts, strict=True)]
        for rank, found in enumerate(results):
            if found.grads[layer] != expected:
                raise Wrong(
                    f"{case}: on rank {rank} the gradient of layer {layer} begins with "
                    f"{found.grads[layer][:1]}, expected {expected[:1]}, the sum over ranks and microbatches"
                )


def _check_moments(results: Results, ready: Sequence[int], case: str) -> None:
    """Compare the start of each sum of the last step, in ms after the step began, with when it could start."""
    if len(results) == 1:
        return  # nothing travels
    spans = [span for span in results.collectives[0] if span.label == "all_reduce"]
    sums = sorted(spans, key=lambda span: span.start)[-len(ready) :]  # whichever was waited for first
    began, free = max(found.began[-1] for found in results), 0
    for place, (span, moment) in enumerate(zip(sums, ready, strict=True)):
        expected = max(moment * MS, free)
        if span.start - began != expected:
            raise Wrong(
                f"{case}: sum number {place} started {(span.start - began) / MS:g} ms after the step, expected "
                f"{expected / MS:g}: when its gradients were complete and the sums before it had left. Start it in the "
                "hook, with async_op=True, and wait in finish()"
            )
        free = expected + int(span.duration)


def _gradient(layer: int, rank: int, microbatch: int) -> list[float]:
    """Whole numbers, whose sums are exact in any order."""
    return [float((1 + layer + place) * (1 + rank) + 7 * microbatch) for place in range(SIZES[layer])]


def _parameters() -> "tuple[list[nn.Parameter], list[nn.Parameter]]":
    """The weights of the layers; all parameters, a frozen one among them."""
    import torch
    from torch import nn

    weights = [nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in SIZES]
    frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    return weights, [*weights[:1], frozen, *weights[1:]]


def _loss(weights: "list[nn.Parameter]", rank: int, microbatch: int, rare: int | None) -> "Tensor":
    """A sum whose gradient is known; the backward of each layer takes its time, the last layer's first."""
    import torch

    from dualpipe_lab.world.context import compute

    class Slow(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:
            compute(BACKWARD)
            return grads[0]

    x = torch.zeros((), dtype=torch.float64)
    for layer, weight in enumerate(weights):
        if not (layer == rare and rank == 0):
            x = x + (weight * torch.tensor(_gradient(layer, rank, microbatch), dtype=torch.float64)).sum()
        x = Slow.apply(x)
    return x


def _found(weights: "list[nn.Parameter]", before: int, began: list[int]) -> Found:
    grads = [[] if weight.grad is None else weight.grad.tolist() for weight in weights]
    return Found(grads, (before, _num_buffers(weights)), began)


def _num_buffers(weights: "list[nn.Parameter]") -> int:
    return len({weight.grad.untyped_storage().data_ptr() for weight in weights if weight.grad is not None})


def _buckets(rank: int, world_size: int, fn: Callable[..., Any], bucket_bytes: int, rare: int | None) -> Found:
    from dualpipe_lab.world.context import now

    weights, parameters = _parameters()
    finish = fn(parameters, bucket_bytes)
    before, began = _num_buffers(weights), now()
    _loss(weights, rank, 0, rare).backward()
    finish()
    return _found(weights, before, [began])


def _once(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> Found:
    from dualpipe_lab.world.context import now

    weights, parameters = _parameters()
    finish, began = fn(parameters, num_microbatches), []
    for _ in range(NUM_STEPS):
        for weight in weights:
            weight.grad = None
        began.append(now())
        for microbatch in range(num_microbatches):
            _loss(weights, rank, microbatch, None).backward()
        finish()
    return _found(weights, 0, began)
