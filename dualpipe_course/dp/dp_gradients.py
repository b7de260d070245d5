"""Exercises of "DP gradients": when the last sum ends, buckets and hooks, a sum too often, a plan of buckets.

Chapter: book/dp/dp-gradients.  Sums are judged by their values, their bytes and their moments on the virtual clock.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, check_found, check_limit
from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.dp.shares import LIBRARY
from dualpipe_course.meter import Meter
from dualpipe_course.plain import plain
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks, partial_score
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong
from dualpipe_lab.launch.emulator import Link

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dualpipe_lab.launch.launcher import Results


BACKWARDS = (9, 11, 7, 6, 4, 4, 12, 2)  # ticks of each layer's backward, last layer first
MESSAGES = (6, 9, 8, 10, 2, 6, 9, 10)  # ticks of each layer's gradient on the link, last layer first
LATENCY, BEST, WHOLE = 5, 89, 120  # ticks: of each bucket's sum; of the best plan; of a single bucket
BACKWARD, MS = 10, 1_000_000  # ms of each layer; nanoseconds
SIZES = (4, 8, 4, 16, 8)  # elements of each layer's weight, in float64
LINK = Link(gbps=0.001)  # 125 bytes take a millisecond
NUM_STEPS = 2


def _slips(f: int, b: int, s: int) -> Known:
    four, one = f + b + 4 * s, f + 4 * b + 4 * s
    hidden = f + 4 * b + s
    return (
        (
            (
                hidden,
                "that hides all sums but one, and they do not keep up: each takes longer than the backward beside it",
            ),
            (f + 8 * b, f"that adds 4 x {b} for the messages; each takes {s}"),
            (one, "that is the end for a single bucket"),
        ),
        (
            (four, "that is the end for four buckets"),
            (hidden, f"a message of four layers takes {4 * s} ms"),
            (f + b + s, "the bucket is full only when the first layer's backward is over"),
        ),
        ((20, "the hooks wait for the last microbatch"), (5, "one for each bucket, in the last microbatch")),
    )


def _plan(given: object) -> list[int]:
    answer = plain(given)
    if not isinstance(answer, (list, tuple)) or not answer:
        raise Wrong("this check takes a list of how many layers each bucket holds, last layers first, such as [4, 4]")
    if not all(type(size) is int and size > 0 for size in answer):
        raise Wrong(f"each bucket holds 1 layer at least, as a whole number, got {list(answer)}")
    if sum(answer) != len(BACKWARDS):
        raise Wrong(f"the buckets hold {sum(answer)} layers, and the model has {len(BACKWARDS)}")
    return list(answer)


def _check_buckets(fn: Callable[..., Any], num_ranks: int, bucket_bytes: int, rare: int | None) -> None:
    """Raise `Wrong` unless `fn(parameters, bucket_bytes)` sums in buckets, during the backward, in one order.

    Where `rare` is a layer, rank 0 does not use it: buckets behind that one are complete there, and must not overtake.
    """
    case = f"{num_ranks} rank(s), buckets of {bucket_bytes} bytes"
    case += "" if rare is None else f", layer {rare} not used by rank 0"
    answer = Without(fn, *LIBRARY)
    results = on_ranks(_buckets, num_ranks, answer, bucket_bytes, rare, case=case, clock="virtual", link=LINK)
    buckets = _expected_buckets(bucket_bytes)
    what = f"buckets of layers {buckets}, the last layer first"
    _check_traffic(results, 1, len(buckets), case, what)
    _check_waits(results, len(buckets), f"{case}, {what}")
    _check_values(results, 1, rare, case)
    for rank, found in enumerate(results):
        before, after = (found.costs[f"buffers {when}"] for when in ("before", "after"))
        if {before, after} != {len(buckets)}:
            raise Wrong(
                f"{case}: on rank {rank} the gradients lie in {before} buffer(s) before the backward and {after} after "
                f"it, expected {len(buckets)}: each .grad is a view of its bucket from the beginning to the end"
            )
    incomplete = next((i for i, bucket in enumerate(buckets) if rare in bucket), len(buckets))
    ready = [(len(SIZES) - min(bucket)) * BACKWARD for bucket in buckets[:incomplete]]
    ready += [len(SIZES) * BACKWARD] * (len(buckets) - incomplete)  # in finish(), after the backward
    _check_moments(results, ready, case)


def _check_once(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless `fn(parameters, num_microbatches)` sums each gradient once a step, in the last backward."""
    case = f"{num_ranks} rank(s), {num_microbatches} microbatch(es), {NUM_STEPS} steps"
    answer = Without(fn, *LIBRARY)
    results = on_ranks(_once, num_ranks, answer, num_microbatches, case=case, clock="virtual", link=LINK)
    what = "one sum for each trained parameter and step"
    _check_traffic(results, NUM_STEPS, NUM_STEPS * len(SIZES), case, what)
    _check_waits(results, NUM_STEPS * len(SIZES), case)
    earlier = (num_microbatches - 1) * len(SIZES)
    _check_moments(results, [(earlier + 1 + place) * BACKWARD for place in range(len(SIZES))], case)
    _check_values(results, num_microbatches, None, case)  # a sum that starts early may still meet the right numbers


def _expected_buckets(bucket_bytes: int) -> list[list[int]]:
    """The layers of each bucket: neighbours share one while it stays within its size.

    >>> _expected_buckets(128), _expected_buckets(10_000)  # layers 2, 1 and 0 have exactly 128 bytes
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


def _check_traffic(results: "Results", num_steps: int, num_sums: int, case: str, what: str) -> None:
    others = len(results) - 1
    needed, most = num_steps * 2 * others * 8 * sum(SIZES), num_sums * 2 * others
    words = f"the ranks sent {{found:,}} bytes, expected {{most:,}}: {what}"
    check_limit(results, Limit("bytes", needed, words, needed), case)
    words = f"rank {{rank}} sent {{found}} messages, and {{most}} are enough for {num_sums} sums: {what}"
    check_limit(results, Limit("messages", most, words, scope="each"), case)


def _check_waits(results: "Results", expected: int, case: str) -> None:
    for rank, spans in enumerate(results.collectives if len(results) > 1 else []):
        waited = sum(span.label == "all_reduce" for span in spans)
        if waited != expected:
            raise Wrong(f"{case}: finish() on rank {rank} waited for {waited} sums, expected {expected}")


def _check_values(results: "Results", num_microbatches: int, rare: int | None, case: str) -> None:
    right: dict[str, Numbers | None] = {}
    for layer, size in enumerate(SIZES):
        owners = range(1, len(results)) if layer == rare else range(len(results))
        parts = [_gradient(layer, rank, m) for rank in owners for m in range(num_microbatches)]
        right[f"layer {layer}"] = Numbers((size,), [sum(column) for column in zip(*parts, strict=True)])
    check_found(results, case, lambda: [right] * len(results), _sum_in_words, tolerance=0, at=": on rank {rank} ")


def _sum_in_words(off: Off) -> str:
    begins = [] if off.found is None else off.found.flat[:1]
    return (
        f"the gradient of {off.name} begins with {begins}, expected {off.expected.flat[:1]}, the sum over ranks and "
        "microbatches"
    )


def _check_moments(results: "Results", ready: Sequence[int], case: str) -> None:
    """Compare the start of each sum of the last step, in ms after the step began, with when it could start."""
    if len(results) == 1:
        return  # nothing travels
    spans = [span for span in results.collectives[0] if span.label == "all_reduce"]
    sums = sorted(spans, key=lambda span: span.start)[-len(ready) :]  # whichever was waited for first
    began, free = max(found.costs["began"] for found in results), 0
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

    from dualpipe_lab.launch.context import compute

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


def _found(weights: "list[nn.Parameter]", before: int, began: int, meter: Meter) -> Found:
    """The gradients of the layers; how many buffers they lie in before and after, when the last step began, in ns."""
    values = {f"layer {layer}": Numbers.of(weight.grad) for layer, weight in enumerate(weights)}
    costs = {"buffers before": before, "buffers after": _num_buffers(weights), "began": began}
    return Found(values, costs=costs | {"messages": meter.lap().messages})


def _num_buffers(weights: "list[nn.Parameter]") -> int:
    return len({weight.grad.untyped_storage().data_ptr() for weight in weights if weight.grad is not None})


def _buckets(rank: int, world_size: int, fn: Callable[..., Any], bucket_bytes: int, rare: int | None) -> Found:
    from dualpipe_lab.launch.context import now

    weights, parameters = _parameters()
    meter, finish = Meter(), fn(parameters, bucket_bytes)
    before, began = _num_buffers(weights), now()
    _loss(weights, rank, 0, rare).backward()
    finish()
    return _found(weights, before, began, meter)


def _once(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> Found:
    from dualpipe_lab.launch.context import now

    weights, parameters = _parameters()
    meter, finish, began = Meter(), fn(parameters, num_microbatches), 0
    for _ in range(NUM_STEPS):
        for weight in weights:
            weight.grad = None
        began = now()
        for microbatch in range(num_microbatches):
            _loss(weights, rank, microbatch, None).backward()
        finish()
    return _found(weights, 0, began, meter)


def _judge_plan(answer: object) -> str:
    sizes = _plan(answer)
    ready = end = first = 0
    sums = []
    for size in sizes:
        last = first + size
        ready += sum(BACKWARDS[first:last])
        start = max(end, ready)
        end = start + LATENCY + sum(MESSAGES[first:last])
        sums.append(f"{start} to {end}")
        first = last
    if end > BEST:
        score = partial_score(end, WHOLE, BEST)
        raise Wrong(
            f"the last sum ends after {end} ticks; {BEST} are possible, a single bucket takes {WHOLE}. The "
            f"backward ends at {ready}; the link is busy from {', '.join(sums)}",
            score=score,
        )
    return f"{len(sizes)} buckets, and the last sum ends after {BEST} ticks, the least there is"


numbers = Predict(
    "dp_gradients-1",
    "When the link is the slower one",
    ("end with four buckets", "end with one bucket", "number of all-reduces"),
    lambda f, b, s: (f + b + 4 * s, f + 4 * b + 4 * s, 4),
    "The forward takes {f} ms in all, the backward {b} ms per layer",
    "gradient {s} ms; a message",
    minutes=8,
    points=1,
    trail=True,
    hints=(
        "The four gradients are ready at 50, 60, 70 and 80 ms. When does the first sum end?",
        "The second sum cannot start at 60: the link is busy until 65.",
        "A single bucket is full at 80 ms. How long does a message of four layers take?",
    ),
    slips=_slips,
    f=(40, 30, 50, 60),
    b=(10, 8, 12),
    s=(15, 20, 18, 25),
    called={"f": "forward", "b": "backward of a layer", "s": "sum of a layer"},
)

buckets = Implement(
    "dp_gradients-2",
    "Buckets and hooks",
    "Write `reduce_in_backward(parameters, bucket_bytes)`: sums leave in buckets during the backward.",
    cases=(
        (1, 64, None),
        (2, 64, None),
        (2, 10_000, None),
        (2, 128, None),  # three layers fill a bucket to the last byte
        (2, 32, None),  # most layers are larger than a bucket, the first one to come too
        (3, 200, None),
        (2, 128, 2),
        (2, 128, 3),  # the bucket behind it is complete and as large: overtaking mixes them up
    ),
    judge=_check_buckets,
    right="values, buckets, views and the moment of every sum are right, unused parameters included",
    minutes=50,
    points=5,
    hints=(
        "First the lists: go through the trained parameters backwards; open a new bucket when the next one would not "
        "fit. A parameter larger than bucket_bytes has one of its own.",
        "Make one flat tensor of zeros per bucket, and each .grad a view of its part: flat[a:b].view_as(p). The hook "
        "counts its parameter as ready; while the next bucket in order is complete, start its all_reduce with "
        "async_op=True and keep the Work.",
        "finish() starts the buckets that are left, where a parameter was not used: their gradient is zero already. "
        "Then it waits for all.",
    ),
)

once = Repair(
    "dp_gradients-3",
    "A sum too often",
    "Repair `sum_in_backward(parameters, num_microbatches)`: each gradient is summed once per step, while it runs.",
    cases=((1, 1), (2, 1), (2, 2), (3, 4)),
    judge=_check_once,
    right="one sum per parameter and step, started in the last backward, for 1, 2 and 4 microbatches",
    minutes=20,
    points=3,
    hints=(
        "Two ranks, two microbatches, each adds 1: after the first sum there is 2 on each rank. And after the second?",
        "Count in the hook, for each parameter, and let the sum start only with the last microbatch.",
        "The next step begins with the same hooks: set the counts and the list of works back in finish().",
    ),
)

plan = Puzzle(
    "dp_gradients-4",
    "A plan of buckets",
    "Cut eight layers into buckets so that the last sum ends after 89 ticks.",
    judge=_judge_plan,
    minutes=15,
    points=2,
    trail=True,
    hints=(
        "The end is that of the last bucket. It should be short, and the link free when it is full.",
        "Each bucket costs 5 ticks of latency. Where does the link stand idle, so that latency costs nothing?",
        "There are only 128 plans: write the loop of the chapter, end = max(end, ready) + message, and try all.",
    ),
)
