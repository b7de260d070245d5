"""Exercises of "DP gradients": the part `buckets`, a plan of buckets.

Chapter: book/dp/dp-gradients.  Sums are judged by their values, their bytes and their moments: by the bytes that have
left when the backward of each layer begins.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Puzzle
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.plain import plain
from dualpipe_course.start.ranks import all_waited_for
from dualpipe_course.trial import partial_score
from dualpipe_course.wrong import Wrong
from dualpipe_lab.launch.emulator import Link

if TYPE_CHECKING:
    from torch import Tensor


BACKWARDS = (9, 11, 7, 6, 4, 4, 12, 2)  # ticks of each layer's backward, last layer first
MESSAGES = (6, 9, 8, 10, 2, 6, 9, 10)  # ticks of each layer's gradient on the link, last layer first
LATENCY, BEST, WHOLE = 5, 89, 120  # ticks: of each bucket's sum; of the best plan; of a single bucket
BACKWARD = 10  # ms of each layer
LINK = Link(gbps=0.001)  # 125 bytes take a millisecond
NUM_STEPS = 2
SHAPES = ((5,), (7,), (2, 2), (16,), (8,), (0, 3))  # of the part's layers, in float64
Unused: TypeAlias = Sequence[tuple[int, int]]  # place in the group and layer


class Moment(NamedTuple):
    """When the backward of a layer begins: the layer, or -1 at the end; bytes sent and milliseconds since it began."""

    layer: int
    sent: int
    ms: float


def _plan(given: object) -> list[int]:
    answer = plain(given)
    if not isinstance(answer, (list, tuple)) or not answer:
        raise Wrong("this check takes a list of how many layers each bucket holds, last layers first, such as [4, 4]")
    if not all(type(size) is int and size > 0 for size in answer):
        raise Wrong(f"each bucket holds 1 layer at least, as a whole number, got {list(answer)}")
    if sum(answer) != len(BACKWARDS):
        raise Wrong(f"the buckets hold {sum(answer)} layers, and the model has {len(BACKWARDS)}")
    return list(answer)


def _in_backward(
    rank: int, world_size: int, ranks: list[int], num_bytes: int, num_backwards: int, unused: Unused
) -> Found:
    """Two steps; what has left is read when the backward of each layer begins, and when all is over."""
    import torch
    from mine.buckets import Buckets

    if rank not in ranks:
        return Found({}, costs={"sent": 0})
    place, early, late = ranks.index(rank), "", ""
    values: dict[str, Numbers | None] = {}
    weights = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
    buckets, meter, sent = Buckets(weights, ranks, num_bytes, num_backwards), Meter(), 0
    for step in range(NUM_STEPS):
        for weight in weights:
            weight.grad = None
        moments = [_backward(weights, place, (step, m), unused) for m in range(num_backwards)]
        early = early or _before_the_last(moments)
        late = late or _in_the_last(moments, place, len(ranks), num_bytes, unused)
        buckets.finish()
        sent += meter.lap().bytes
        values |= {_name(layer, step): Numbers.of(weight.grad) for layer, weight in enumerate(weights)}
    all_waited_for()
    return Found(values, costs={"sent": sent}, refused=early, changed=late)


def _backward(weights: "list[Tensor]", place: int, of: tuple[int, int], unused: Unused) -> list[Moment]:
    """Run a backward; return the layers whose backward has begun, each with what was spent until then, and the end."""
    import torch

    from dualpipe_lab.launch.context import compute

    meter = Meter()
    found: list[Moment] = []
    sent, ms = 0, 0.0

    class Slow(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, x: torch.Tensor, layer: int) -> torch.Tensor:
            context.layer = layer
            return x.clone()

        @staticmethod
        def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            note(context.layer)
            compute(BACKWARD)
            return grads[0], None

    def note(layer: int) -> None:
        nonlocal sent, ms
        lap = meter.lap()
        sent, ms = sent + lap.bytes, ms + lap.ms
        found.append(Moment(layer, sent, ms))

    x = torch.zeros((), dtype=torch.float64)
    for layer, weight in enumerate(weights):
        if (place, layer) not in unused:
            x = x + (weight * _grad(layer, place, of)).sum()
        x = Slow.apply(x, layer)
    if x.requires_grad:
        x.backward()
    note(-1)
    return found


def _before_the_last(moments: list[list[Moment]]) -> str:
    """What left before the last backward, in words."""
    for m, found in enumerate(moments[:-1]):
        if sent := found[-1].sent:
            return (
                f"{sent} bytes left in the backward of microbatch {m}, and {len(moments)} add to each gradient: count "
                "the gradients of a bucket, and send in the last backward"
            )
    return ""


def _in_the_last(moments: list[list[Moment]], place: int, num: int, num_bytes: int, unused: Unused) -> str:
    """What is wrong with the moments of the sends, in words; behind an incomplete bucket others may leave or wait."""
    waited = max(found[-1].ms - BACKWARD * (len(found) - 1) for found in moments)
    if waited > 0 and num > 1:
        return (
            f"the backward took {waited:g} ms longer than its layers: the hook has waited. Start all messages there "
            "with isend and irecv, and wait in finish()"
        )
    buckets = _expected_buckets(num_bytes)
    used = [not any((place, layer) in unused for layer in bucket) for bucket in buckets]
    in_order = used.index(False) if False in used else len(buckets)
    for layer, sent, _ in moments[-1]:
        due = [(num - 1) * 8 * -(-_numel(bucket) // num) * (min(bucket) > layer) for bucket in buckets]
        least, most = sum(due[:in_order]), sum(size for size, is_used in zip(due, used, strict=True) if is_used)
        if not least <= sent <= most:
            when = f"the backward of layer {layer} began" if layer >= 0 else "the backward was over"
            return (
                f"when {when}, {sent} bytes had left, expected {most}: the buckets are of layers {buckets}, and "
                "the hook sends every other rank its block of a bucket when it is complete, not earlier or later"
            )
    return ""


def _expected_buckets(num_bytes: int) -> list[list[int]]:
    """The layers of each bucket: neighbours share one while it stays within its size.

    >>> _expected_buckets(128), _expected_buckets(100)  # layers 2, 1 and 0 have exactly 128 bytes
    ([[5, 4], [3], [2, 1, 0]], [[5, 4], [3], [2, 1], [0]])
    """
    buckets: list[list[int]] = []
    for layer in reversed(range(len(SHAPES))):
        if not buckets or 8 * (_numel(buckets[-1]) + _numel([layer])) > num_bytes:
            buckets.append([])
        buckets[-1].append(layer)
    return buckets


def _numel(layers: Sequence[int]) -> int:
    return sum(prod(SHAPES[layer]) for layer in layers)


def _grad(layer: int, place: int, of: tuple[int, int]) -> "Tensor":
    """Whole numbers; tens are the microbatch, thousands the step."""
    import torch

    step, microbatch = of
    numbers = torch.arange(prod(SHAPES[layer]), dtype=torch.float64).view(SHAPES[layer])
    return (numbers + layer + 1) * (1 + place) + 10 * microbatch + 1000 * step


def _name(layer: int, step: int) -> str:
    return f"the gradient of layer {layer} in step {step}"


def _sums(
    rank: int, world_size: int, ranks: list[int], num_bytes: int, num_backwards: int, unused: Unused
) -> "dict[str, Tensor | None]":
    """The sums over a group and all microbatches."""
    import torch

    found: dict[str, torch.Tensor | None] = {}
    for step in range(NUM_STEPS):
        for layer, shape in enumerate(SHAPES):
            owners = [place for place in range(len(ranks)) if (place, layer) not in unused]
            parts = [_grad(layer, place, (step, m)) for place in owners for m in range(num_backwards)]
            total = torch.stack(parts).sum(0) if parts else torch.zeros(shape, dtype=torch.float64)
            found[_name(layer, step)] = total if rank in ranks else None
    return found


def _bytes_of_buckets(
    world_size: int, ranks: list[int], num_bytes: int, num_backwards: int, unused: Unused
) -> list[Limit]:
    num = len(ranks)
    blocks = sum(-(-_numel(bucket) // num) for bucket in _expected_buckets(num_bytes))
    words = (
        "the ranks sent {found} bytes in two steps, {most} are enough: of each bucket every rank sends every other one "
        "its block, and then its own sum"
    )
    return [Limit("sent", NUM_STEPS * num * 2 * (num - 1) * 8 * blocks, words)]


def _why_not_in_buckets(off: Off) -> str:
    if off.found is None:
        return f"{off.name} is missing: one that this rank did not use counts as zeros, and gets the sum of the others"
    if off.name.endswith("step 1") and not off.has_other_shape:
        return f"{in_words(off)}. Step 0 was right, so something of it is left: finish() sets the counts back"
    return in_words(off)


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


buckets = Part(
    "dp_gradients-5",
    "buckets",
    "Gradients in buckets",
    "Write Buckets: gradients leave in blocks while the backward runs, and finish() puts the sums in their place.",
    names=("Buckets",),
    trials=(
        OnRanks(
            _in_backward,
            (
                (1, [0], 64, 1, []),
                (2, [0, 1], 100, 1, []),
                (2, [1, 0], 10_000, 1, []),
                (2, [0, 1], 128, 3, []),
                (3, [0, 1, 2], 200, 1, []),
                (2, [0, 1], 128, 1, [(0, 3)]),  # the bucket behind it is complete, and may overtake
                (4, [3, 1], 32, 2, []),
                (3, [2, 0, 1], 128, 1, [(1, layer) for layer in range(6)]),
            ),
            _sums,
            "group {1} of {0} rank(s), {2} bytes, {3} backward(s), unused (place, layer) {4}",
            _bytes_of_buckets,
            _why_not_in_buckets,
            options={"clock": "virtual", "link": LINK},
        ),
    ),
    right="8 groups, two steps each: sums, bytes, moments; unused parameters, and a rank without a backward",
    minutes=75,
    points=5,
    hints=(
        "First the lists: go through the parameters backwards, and open a bucket when the next one would not fit. A "
        "hook (register_post_accumulate_grad_hook) counts the gradients that its bucket still waits for.",
        "When nothing is missing: the gradients of a bucket in one row, padded to N blocks; isend of block j to rank "
        "j, irecv of your own block from every other rank, with a tag for each bucket. Keep tensors and works, and do "
        "not wait. finish() first starts what is left, with zeros where .grad is None.",
        "finish(): for each bucket in the same order on all ranks: wait; own block + those that arrived; "
        "all_gather(sum, ranks)[:numel].split(sizes), and each piece becomes its parameter's .grad. Then set the "
        "counts back for the next step.",
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
