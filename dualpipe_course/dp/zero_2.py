"""Exercises of "ZeRO-2": its numbers, a gradient that counts again.

Chapter: book/dp/zero-2.  Shards are judged against one process that sees every rank's microbatches, in float64, and by
what is left of the whole gradients.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off
from dualpipe_course.declared import Predict, Repair
from dualpipe_course.meter import MemoryMeter, Meter

if TYPE_CHECKING:
    from torch import Tensor


NUMBERS = ("bytes held", "bytes sent", "peak of gradient bytes")
_SLIPS = (
    {
        16800: "this is ZeRO-1, 4 + 12 / N; here the gradients are sharded too",
        9600: "this is ZeRO-3, 16 / N; the weights are whole here",
        38400: "this is plain data parallelism",
    },
    {
        7200: "this is one microbatch; each of the 6 sends its gradients",
        43200: "weights are gathered once per step, not in every microbatch",
        33600: "(N - 1) / N: a rank's own shard does not travel",
        21600: "the new weights travel too, once per step",
        64800: "this is ZeRO-3, which gathers weights twice in every microbatch",
    },
    {
        1200: "these are the shards; buckets that fill and travel come on top",
        1600: "these are the two buckets; the shards are there too",
        2000: "one bucket fills while another one is under way",
        4800: "this is the whole gradient, which is never there",
    },
)
NAMES = ("head", "a", "b", "first", "bias")

_LEFT = (
    "rank {rank} still holds {found} bytes of whole gradients after the backward; drop .grad, and any buffer, as soon "
    "as they have left"
)


def _scatter_limits(num_ranks: int, num_microbatches: int) -> list[Limit]:
    # with one microbatch the same slip shows in the numbers of the next case, which say more
    return [Limit("bytes left", 0, _LEFT, scope="each")] if num_microbatches > 1 else []


def _shard_in_words(off: Off) -> str:
    reason = off.slip or "it differs from that of one process; did buckets change places?"
    return f"the shard of {off.name}: {reason}"


def _make() -> dict[str, "Tensor"]:
    import torch

    generator = torch.Generator().manual_seed(11)
    shapes = {"head": (3, 5), "a": (5, 5), "b": (5, 5), "first": (5, 7), "bias": (5,)}  # 7 x 5 divides by no 2, 3 or 4
    return {
        name: torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }


def _backward(
    weights: dict[str, "Tensor"], rank: int, microbatch: int, before_first: Callable[[], None] = lambda: None
) -> None:
    """Odd ranks run the experts in the other order; `before_first` is called when the first layer is left alone."""
    import torch

    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    x = torch.randn(4, 7, dtype=torch.float64, generator=generator)
    hidden = torch.tanh(x @ weights["first"].t() + weights["bias"])
    hidden.register_hook(lambda _: before_first())
    order = "ab" if rank % 2 == 0 else "ba"
    parts = {name: torch.tanh(hidden @ weights[name]) for name in order}
    ((parts["a"] - 2 * parts["b"]) @ weights["head"].t()).square().sum().backward()


def _expected(world_size: int, num_microbatches: int) -> list[dict[str, "Tensor"]]:
    """For each microbatch, the gradients summed over the ranks."""
    sums = []
    for microbatch in range(num_microbatches):
        weights = _make()
        for rank in range(world_size):
            _backward(weights, rank, microbatch)
        sums.append({name: weight.grad.clone() for name, weight in weights.items()})
    return sums


def _cut(grads: dict[str, "Tensor"], names: Sequence[str], rank: int, world_size: int) -> "Tensor":
    """This rank's shard of some gradients, padded."""
    import torch
    from torch.nn.functional import pad

    flat = torch.cat([grads[name].flatten() for name in names])
    return pad(flat, (0, -len(flat) % world_size)).view(world_size, -1)[rank]


def _beside(found: "list[Tensor]", groups: Any, rank: int, world_size: int, num: int, costs: dict[str, float]) -> Found:
    """Shards by the names in them, beside the right ones and those of typical slips in `num` microbatches."""
    parts = _expected(world_size, num)
    weighed = {
        "right": [1.0] * num,
        "it is that of the last microbatch alone; add, do not copy": [0.0] * (num - 1) + [1.0],
        "it is that of the first microbatch alone": [1.0] + [0.0] * (num - 1),
        "microbatches count several times, early ones most; what .grad still holds is sent again": [
            float(num - index) for index in range(num)
        ],
        "it is divided by the ranks; the loss is divided already": [1.0 / world_size] * num,
        "it is zero; did anything arrive?": [0.0] * num,
    }
    made = {}
    for text, factors in weighed.items():
        total = {name: sum(f * part[name] for f, part in zip(factors, parts, strict=True)) for name in NAMES}
        made[text] = [_cut(total, names, rank, world_size) for names in groups]
    named, right = [", ".join(names) for names in groups], made.pop("right")
    return Found(
        {name: Numbers.of(shard) for name, shard in zip(named, found, strict=True)},
        {name: Numbers.of(shard) for name, shard in zip(named, right, strict=True)},
        {name: {text: Numbers.of(values[i]) for text, values in made.items()} for i, name in enumerate(named)},
        costs,
    )


def _with_scatter(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> Found:
    weights = _make()
    shards = {name: w.new_zeros(-(-w.numel() // world_size)).detach() for name, w in weights.items()}

    def after_each() -> None:
        for name, weight in weights.items():
            fn(weight, shards[name])

    left, _ = _run(weights, rank, num_microbatches, lambda: None, after_each)
    groups, own = [[name] for name in NAMES], [shards[name] for name in NAMES]
    return _beside(own, groups, rank, world_size, num_microbatches, {"bytes left": left})


def _run(
    weights: dict[str, "Tensor"],
    rank: int,
    num_microbatches: int,
    attach: Callable[[], None],
    after_each: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """All microbatches; returns bytes that live afterwards and did not before, and sends before the first layer's."""
    memory, early, meter = MemoryMeter(), 0, Meter()
    attach()
    for microbatch in range(num_microbatches):
        calls: list[int] = []
        meter.lap()
        _backward(weights, rank, microbatch, lambda seen=calls: seen.append(meter.lap().messages))  # type: ignore[misc]
        early += calls[0]
        after_each()
    return memory.grown(), early


numbers = Predict(
    "zero_2-1",
    "Six microbatches",
    NUMBERS,
    lambda n, ranks, bucket: ((2 + 14 / ranks) * n, 14 * (ranks - 1) * n / ranks, 2 * n / ranks + 4 * bucket),
    "{n:,} parameters on {ranks} ranks",
    "more than {bucket} parameters",
    minutes=10,
    points=1,
    hints=(
        "2 + 14 / N bytes per parameter.",
        "Six times the gradients, once the weights: each (N - 1) / N of 4,800 bytes.",
        "The shards of all gradients are 2 bytes for each of 600 numbers; a bucket is 2 bytes for each of 400.",
    ),
    slips=_SLIPS,
    n=(2400, 1600, 3200, 4000, 4800),
    ranks=(4, 2, 8),
    bucket=(400, 200, 300),
    called={"n": "parameters", "bucket": "parameters of a bucket"},
)


every_microbatch = Repair(
    "zero_2-3",
    "Right with one microbatch",
    "Repair the hook that counts the gradients of early microbatches several times.",
    cases=((1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (4, 2)),
    run=_with_scatter,
    limits=_scatter_limits,
    why=_shard_in_words,
    named="{} rank(s), {} microbatch(es)",
    right="each microbatch counts once, and no whole gradient is left after a backward",
    minutes=8,
    points=2,
    hints=(
        "Let the gradients of three microbatches be g1, g2 and g3. What is in p.grad after the second backward?",
        "A backward adds to p.grad. Whatever is still there is sent again.",
        "A gradient that has been sent has to go: that is also what ZeRO-2 is for.",
    ),
)
