"""Exercises of "ZeRO-3": its numbers, a layer without its weight, a unit that is away, how far ahead to ask.

Chapter: book/dp/zero-3.  Gradients are judged against one process in float64; what is whole when is counted, and so is
what a layer keeps between forward and backward.
"""

from collections.abc import Callable
from itertools import pairwise
from time import sleep
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off
from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.plain import plain
from dualpipe_course.trial import partial_score
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor, nn


NUMBERS = ("bytes held", "bytes sent", "all-gathers")
SIZES, WORK, ROOM = (2, 2, 4, 1, 3, 3), (5, 3, 3, 1, 1, 4), 8  # of the puzzle: GB, ticks, GB
LAZY, BEST = 32, 20
INS, HIDDEN, OUTS, ROWS, UNITS = 23, 17, 23, 2, 4  # weights of 17 x 23 and 23 x 17, far larger than activations
NUMBER = 8  # bytes
_KEPT = (
    "between forward and backward {found:,} bytes stay that were not there before; activations and shards are {most:,} "
    "at most. W may not be kept, whole or in pieces; save the shard"
)
_TRAFFIC = (
    "rank {rank} sent {found} bytes, expected {most}: each weight is gathered once in a forward and once in a "
    "backward, and its gradient is scattered once"
)


def _slips(unit: int, root: int, m: int) -> Known:
    total, one = 4 * unit + root, f"this is one microbatch; there are {m}"
    return (
        (
            (16 * total, "this is plain data parallelism; everything is sharded over 4 ranks"),
            (16 * unit, "the root is sharded too"),
        ),
        (
            (3 / 4 * (24 * unit + 4 * root), one),
            (
                3 / 4 * m * (24 * unit + 6 * root),
                "the root is gathered once per microbatch, for forward and backward together",
            ),
            (m * (24 * unit + 4 * root), "(N - 1) / N: a rank's own shard does not travel"),
            (3 / 4 * m * 24 * unit, "these are the units; the root travels too"),
            (3 / 4 * m * (16 * unit + 4 * root), "units that are freed after the forward are gathered twice"),
            (3 * total, "this is plain data parallelism, two units of traffic per step"),
        ),
        (
            (10 * m, "the root is not freed after the forward, so it is gathered once per microbatch"),
            (8 * m, "these are the units'; the root is gathered too"),
            (5 * m, "units that are freed after the forward are gathered twice"),
            (9, one),
        ),
    )


def _asked(given: object) -> list[int]:
    answer = plain(given)
    if not isinstance(answer, (list, tuple)) or len(answer) != len(SIZES):
        raise Wrong(f"expected a list of {len(SIZES)} turns, one for each unit")
    if not all(type(turn) is int for turn in answer):
        raise Wrong("a turn is the whole number of a unit")
    if (late := next((unit for unit, turn in enumerate(answer) if not 0 <= turn <= unit), None)) is not None:
        raise Wrong(f"unit {late} is asked for at turn {answer[late]}; it is needed at turn {late}, and the first is 0")
    if any(first > second for first, second in pairwise(answer)):
        raise Wrong("units are asked for in their order, so that no turn may be before that of the unit before")
    return list(answer)


def _memory(asked: list[int], turn: int) -> int:
    return sum(size for unit, size in enumerate(SIZES) if unit >= turn and asked[unit] <= turn)


def _ticks(asked: list[int]) -> int:
    now, link, there = 0, 0, [0] * len(SIZES)
    for turn, work in enumerate(WORK):
        for unit in (unit for unit, when in enumerate(asked) if when == turn):
            there[unit] = link = max(now, link) + SIZES[unit]
        now = max(now, there[turn]) + work
    return now


def _linear_limits(num_ranks: int, last: int) -> list[Limit]:
    most = 2 * 3 * (num_ranks - 1) * -(-INS * HIDDEN // num_ranks) * NUMBER
    kept = Limit("bytes kept", _enough(num_ranks), _KEPT, scope="each")
    return [*[kept] * (num_ranks > 1), Limit("bytes", most, _TRAFFIC, most, scope="each")]


def _enough(num_ranks: int) -> int:
    """Bytes of all activations, twice, and of one copy of both shards."""
    return NUMBER * (2 * ROWS * (INS + 2 * HIDDEN + OUTS) + 2 * -(-INS * HIDDEN // num_ranks))


def _unit_limits(num_ranks: int, num_microbatches: int) -> list[Limit]:
    gathers = 2 * UNITS * num_microbatches
    words = "{found} gathers, expected {most}: two for each unit and microbatch"
    return [
        Limit("whole at once", 2, "{found} units were whole at once; free each after its forward", scope="each"),
        Limit("gathers", gathers, words, gathers, scope="each"),
        Limit("whole in the end", 0, "{found} unit(s) are still whole after the last backward", scope="each"),
        Limit("forwards of NaN", 0, "a forward under torch.no_grad() gives NaN", scope="each"),
    ]


def _unit_in_words(off: Off) -> str:
    if off.found is not None and any(value != value for value in off.found.flat):
        return (
            f"the gradients of {off.name} are NaN: a weight was read while it was away. In the backward, when is it "
            "gathered, and when is it needed?"
        )
    return f"the gradients of {off.name} differ from those of one process"


def _cut(whole: "Tensor", rank: int, world_size: int) -> "Tensor":
    from torch.nn.functional import pad

    return pad(whole.flatten(), (0, -whole.numel() % world_size)).view(world_size, -1)[rank].clone()


def _drawn(num_ranks: int, last: int) -> "tuple[list[Tensor], list[Tensor]]":
    """Both weights, and the inputs of every rank."""
    import torch

    generator = torch.Generator().manual_seed(2)
    shapes = ((HIDDEN, INS), (OUTS, HIDDEN))
    weights = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]
    *others, of_last = torch.randn(num_ranks, ROWS, INS, dtype=torch.float64, generator=generator)
    return weights, [*others, of_last[:last]]


def _linear(rank: int, world_size: int, fn: Callable[..., Any], last: int) -> Found:
    import torch

    weights, inputs = _drawn(world_size, last)
    shards = [_cut(weight, rank, world_size).requires_grad_() for weight in weights]
    x = inputs[rank].clone().requires_grad_()
    weights.clear()
    y, kept = _watched(lambda: fn(torch.tanh(fn(x, shards[0], HIDDEN)), shards[1], OUTS), _enough(world_size))
    found = {"the output": Numbers.of(y.flatten())}
    y.square().sum().backward()
    grads = {"x.grad": x.grad} | {f"shard.grad of layer {i + 1}": shard.grad for i, shard in enumerate(shards)}
    found |= {name: None if grad is None else Numbers.of(grad.flatten()) for name, grad in grads.items()}
    return Found(found, costs={"bytes kept": kept})


def _one_process(rank: int, num_ranks: int, last: int) -> "dict[str, Tensor]":
    import torch

    weights, inputs = _drawn(num_ranks, last)
    whole = [weight.requires_grad_() for weight in weights]
    parts = [part.clone().requires_grad_() for part in inputs]
    outputs = [torch.tanh(part @ whole[0].t()) @ whole[1].t() for part in parts]
    for y in outputs:
        y.square().sum().backward()
    expected = {"the output": outputs[rank], "x.grad": parts[rank].grad}
    for index, weight in enumerate(whole):
        expected[f"shard.grad of layer {index + 1}"] = _cut(weight.grad, rank, num_ranks)
    return {name: values.flatten() for name, values in expected.items()}


def _watched(forward: Callable[[], Any], enough: int) -> tuple[Any, int]:
    """Run a forward; return its output and the bytes that stay, in tensors of real numbers that were not there."""
    import gc

    from torch.autograd.graph import saved_tensors_hooks

    from dualpipe_lab.dp.measure import live_tensors, storage_bytes

    gc.freeze()  # what is there already is not looked at
    with saved_tensors_hooks(lambda tensor: (tensor,), lambda held: held[0]):  # what autograd saves, Python sees too
        y = forward()
    for _ in range(20):
        kept = storage_bytes(tensor for tensor in live_tensors() if tensor.is_floating_point())
        if kept <= enough:
            break
        sleep(0.05)  # a back end's thread may still hold what was gathered
    return y, kept


class Unit:
    """The weights of a module: gathered, freed (then they read as NaN), scattered when all gradients are there."""

    def __init__(self, module: "nn.Module", all_units: list["Unit"]) -> None:
        import torch
        from torch.nn.functional import pad

        from dualpipe_lab import comm

        self._parameters = list(module.parameters())
        self._size, rank = comm.get_world_size(), comm.get_rank()
        flat = torch.cat([parameter.detach().flatten() for parameter in self._parameters])
        self._full = pad(flat, (0, -len(flat) % self._size))
        self._shard = self._full.view(self._size, -1)[rank].clone()
        self.grad, self.num_gathers, self.most_whole = torch.zeros_like(self._shard), 0, 0
        self._all, self.is_whole, start = all_units, True, 0
        for parameter in self._parameters:
            parameter.data = self._full[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self.free()

    def gather(self) -> None:
        """Make the weights whole, unless they are."""
        from dualpipe_lab import comm

        if not self.is_whole:
            comm.all_gather_single(self._full, self._shard)
            self.is_whole, self.num_gathers = True, self.num_gathers + 1
            self.most_whole = max(self.most_whole, sum(unit.is_whole for unit in self._all))

    def free(self) -> None:
        """Give the weights up."""
        self._full.fill_(float("nan"))
        self.is_whole = False

    def _arrived(self, _: object) -> None:
        if all(parameter.grad is not None for parameter in self._parameters):
            self._scatter()
            self.free()

    def _scatter(self) -> None:
        import torch
        from torch.nn.functional import pad

        from dualpipe_lab import comm

        flat = torch.cat([parameter.grad.flatten() for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None
        own = torch.empty_like(self._shard)
        comm.reduce_scatter_single(own, pad(flat, (0, len(self._full) - len(flat))))
        self.grad += own


def _model() -> "nn.Module":
    import torch
    from torch import nn

    torch.manual_seed(4)
    return nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(UNITS)]).double()


def _connect(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> Found:
    import torch

    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(num_microbatches, world_size, 3, 5, dtype=torch.float64, generator=generator)
    plain, model = _model(), _model()
    plain(inputs.flatten(0, 2)).square().sum().backward()
    expected = [_cut(torch.cat([p.grad.flatten() for p in module.parameters()]), rank, world_size) for module in plain]
    units: list[Unit] = []
    for module in model:
        units.append(Unit(module, units))
        fn(module, units[-1])
    for microbatch in inputs[:, rank]:
        x = microbatch.clone().requires_grad_()  # or torch warns that a backward hook of the first unit has no inputs
        model(x).square().sum().backward()
    costs = {"gathers": sum(unit.num_gathers for unit in units), "whole in the end": sum(u.is_whole for u in units)}
    costs["whole at once"] = max(unit.most_whole for unit in units)
    try:
        with torch.no_grad():
            costs["forwards of NaN"] = int(not model(inputs[0, rank]).isfinite().all())
    except Exception as error:
        why = "nothing there requires a gradient, so its output takes no hook"
        refused = f"a forward under torch.no_grad() raised {type(error).__name__}: {error}; {why}"
        return Found({}, refused=refused)
    names = {f"unit {unit}": unit for unit in reversed(range(UNITS))}  # in the order of the backward
    return Found(
        {name: Numbers.of(units[unit].grad) for name, unit in names.items()},
        {name: Numbers.of(expected[unit]) for name, unit in names.items()},
        costs=costs,
    )


def _judge_how_far_ahead(answer: object) -> str:
    asked = _asked(answer)
    if (over := next((turn for turn in range(len(SIZES)) if _memory(asked, turn) > ROOM), None)) is not None:
        raise Wrong(f"before the forward of unit {over}, {_memory(asked, over)} GB are taken; there is room for {ROOM}")
    if (ticks := _ticks(asked)) > BEST:
        raise Wrong(f"it fits and takes {ticks} ticks; {BEST} are possible", score=partial_score(ticks, LAZY, BEST))
    return f"{BEST} ticks within {ROOM} GB, {sum(WORK)} of them work; one unit ahead takes 24"


numbers = Predict(
    "zero_3-1",
    "Four units and a tied root",
    NUMBERS,
    lambda unit, root, m: (4 * (4 * unit + root), 3 / 4 * m * (24 * unit + 4 * root), 9 * m),
    "Four units of {unit:,} parameters each, and a root of {root} that",
    "{m} microbatches per step; units",
    minutes=10,
    points=1,
    trail=True,
    hints=(
        "16 bytes for each of 4,200 parameters, sharded over 4 ranks.",
        "Per microbatch a unit travels three times and the root twice, each time 3/4 of its bytes in bf16.",
        "Four units are gathered twice in each of 3 microbatches, the root once.",
    ),
    slips=_slips,
    unit=(1000, 500, 1500, 2000),
    root=(200, 100, 300, 400),
    m=(3, 2, 4, 5),
    called={"m": "microbatches"},
)

linear = Implement(
    "zero_3-2",
    "A linear layer without its weight",
    "Write a linear layer that gathers its weight in forward and backward and keeps none of it in between.",
    cases=((2, ROWS), (1, ROWS), (3, ROWS), (4, ROWS), (3, 0)),
    run=_linear,
    reference=_one_process,
    limits=_linear_limits,
    named="two layers on {} rank(s), {} rows on the last",
    right="two layers on 1 to 4 ranks: gradients of one process, two gathers and a scatter each, no weight kept",
    minutes=30,
    points=4,
    hints=(
        "Write a torch.autograd.Function: its forward saves x and the shard, not W, and its backward gathers W again.",
        "With y = x W^T: dx = dy W and dW = dy^T x. The backward returns one gradient per argument, None for a number.",
        "Pad the flattened dW to N * len(shard) before the reduce-scatter, and cut it off the gathered W.",
    ),
)

away = Repair(
    "zero_3-3",
    "Away when it is needed",
    "Repair the hooks of a unit whose weights are away in its backward.",
    cases=((1, 1), (2, 1), (2, 2), (3, 2)),
    run=_connect,
    limits=_unit_limits,
    why=_unit_in_words,
    named=f"{UNITS} units, {{}} rank(s), {{}} microbatch(es)",
    right="gradients of one process, two gathers per unit and microbatch, at most two units whole at once",
    minutes=10,
    points=3,
    trail=True,
    hints=(
        "Which units have NaN in their gradients: the last one too?",
        "register_full_backward_hook calls its function when the gradients of the module's inputs have been computed.",
        "There is a hook that comes before the module's backward; or hook the output's gradient.",
    ),
)

how_far_ahead = Puzzle(
    "zero_3-4",
    "How far ahead",
    "Choose when to ask for each of six units: within 8 GB, as few ticks as possible.",
    judge=_judge_how_far_ahead,
    minutes=25,
    points=2,
    hints=(
        "Which units fit into 8 GB before the first forward?",
        "A long forward early on is time for the link. Let it work on unit 2 while unit 0 computes.",
        "Whenever a unit has been freed, ask for the next one that fits.",
    ),
)
