"""Exercises of "ZeRO-3": a layer without its weight, a unit that is away.

Chapter: book/dp/zero-3.  Gradients are judged against one process in float64; what is whole when is counted, and so are
the bytes that live between forward and backward.
"""

from collections.abc import Callable
from time import sleep
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off
from dualpipe_course.declared import Repair
from dualpipe_course.own.part import OnRanks, Part

if TYPE_CHECKING:
    from torch import Tensor, nn


UNITS, INS, HIDDEN, OUTS = 4, 23, 17, 23  # weights of 17 x 23 and 23 x 17, far larger than activations
NUMBER = 8  # bytes
_KEPT = (
    "rank {rank}: between forward and backward {found:,.0f} bytes stay that were not there before; activations and "
    "shards are {most:,} at most. The whole weight may not be kept, in one piece or in several; keep x and the shard"
)
_SHARD = (
    "rank {rank}: the shard keeps {found:,} bytes alive and has {most:,}: a view of the weight keeps all of it; make a "
    "copy"
)
_TRAFFIC = (
    "rank {rank} sent {found:,} bytes, expected {most:,}: each weight is gathered once in a forward and once in a "
    "backward, and its gradient is scattered once"
)


def _sharded_limits(num_ranks: int, groups: list[list[int]], rows: list[int]) -> list[Limit]:
    nums = [len(next(group for group in groups if rank in group)) for rank in range(num_ranks)]
    block = [-(-INS * HIDDEN // num) * NUMBER for num in nums]
    sent = [2 * len(rows) * 3 * (num - 1) * one for num, one in zip(nums, block, strict=True)]
    return [
        Limit("shard bytes", block, _SHARD, scope="each"),
        Limit("bytes kept", [_enough(num, rows) if num > 1 else 1e9 for num in nums], _KEPT, scope="each"),
        Limit("bytes", sent, _TRAFFIC, sent, scope="each"),
    ]


def _enough(num: int, rows: list[int]) -> int:
    """Bytes of all activations, twice, and of one copy of both shards."""
    return NUMBER * (2 * sum(rows) * (INS + 2 * HIDDEN + OUTS) + 2 * -(-INS * HIDDEN // num))


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


def _drawn(ranks: list[int], rows: list[int]) -> "tuple[list[Tensor], list[list[Tensor]]]":
    """Both weights, and the inputs of every rank of a group by microbatch; the last of several ranks has no rows."""
    import torch

    generator = torch.Generator().manual_seed(2 + ranks[0])
    shapes = ((HIDDEN, INS), (OUTS, HIDDEN))
    weights = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]
    inputs = []
    for place in range(len(ranks)):
        has_none = place == len(ranks) - 1 > 0
        sizes = [0 if has_none else num for num in rows]
        inputs.append([torch.randn(num, INS, dtype=torch.float64, generator=generator) for num in sizes])
    return weights, inputs


def _first(x: "Tensor", weight: "Tensor") -> "Tensor":
    return x @ weight.t()


def _second(x: "Tensor", weight: "Tensor") -> "Tensor":
    """Not linear in the weight, so that its gradient needs the weight and x."""
    import torch

    return torch.tanh(x @ weight.t() / 8)


def _sharded(rank: int, world_size: int, groups: list[list[int]], rows: list[int]) -> Found:
    """Two layers, and all microbatches' forwards before their backwards."""
    from mine.zero3 import Unit, shard_of

    from dualpipe_lab.dp.measure import storage_bytes

    ranks = next(group for group in groups if rank in group)
    weights, inputs = _drawn(ranks, rows)
    shapes = [tuple(weight.shape) for weight in weights]
    shards = [shard_of(weight, ranks) for weight in weights]
    if not all(shard.is_leaf and shard.requires_grad for shard in shards):
        return Found({}, refused="shard_of returns no leaf that requires a gradient: the optimizer finds .grad there")
    found = {f"shard {place}": Numbers.of(shard) for place, shard in enumerate(shards)}
    weights.clear()
    xs = [x.clone().requires_grad_() for x in inputs[ranks.index(rank)]]

    def forward() -> "list[Tensor]":
        return [
            Unit.apply(Unit.apply(x, shards[0], _first, shapes[0], ranks), shards[1], _second, shapes[1], ranks)
            for x in xs
        ]

    outputs, kept = _watched(forward, _enough(len(ranks), rows))
    for number, (x, y) in enumerate(zip(xs, outputs, strict=True)):
        found[f"the output of microbatch {number}"] = Numbers.of(y)
        y.square().sum().backward()
        found[f"x.grad of microbatch {number}"] = None if x.grad is None else Numbers.of(x.grad)
    for place, shard in enumerate(shards):
        found[f"shard.grad of layer {place}"] = None if shard.grad is None else Numbers.of(shard.grad)
    costs = {"bytes kept": kept, "shard bytes": max(storage_bytes([shard]) for shard in shards)}
    return Found(found, slips=_own_rows(ranks, rank, rows), costs=costs)


def _one_process(rank: int, num_ranks: int, groups: list[list[int]], rows: list[int]) -> "dict[str, Tensor]":
    ranks = next(group for group in groups if rank in group)
    weights, inputs = _drawn(ranks, rows)
    me, num = ranks.index(rank), len(ranks)
    whole = [weight.requires_grad_() for weight in weights]
    xs = [[x.requires_grad_() for x in own] for own in inputs]
    outputs = [[_second(_first(x, whole[0]), whole[1]) for x in own] for own in xs]
    for y in [y for own in outputs for y in own]:
        y.square().sum().backward()
    found = {f"shard {place}": _cut(weight.detach(), me, num) for place, weight in enumerate(whole)}
    for number, (x, y) in enumerate(zip(xs[me], outputs[me], strict=True)):
        found |= {f"the output of microbatch {number}": y.detach(), f"x.grad of microbatch {number}": x.grad}
    return found | {f"shard.grad of layer {place}": _cut(weight.grad, me, num) for place, weight in enumerate(whole)}


def _own_rows(ranks: list[int], rank: int, rows: list[int]) -> "dict[str, dict[str, Numbers | None]]":
    """What a gradient is that is not summed over the ranks, or divided by their number."""
    weights, inputs = _drawn(ranks, rows)
    me, num = ranks.index(rank), len(ranks)
    if num == 1:
        return {}
    whole = [weight.requires_grad_() for weight in weights]
    for x in inputs[me]:
        _second(_first(x, whole[0]), whole[1]).square().sum().backward()
    words = "it is that of this rank's own rows; every rank has other rows, and their gradients add up"
    return {
        f"shard.grad of layer {place}": {words: Numbers.of(_cut(weight.grad, me, num))}
        for place, weight in enumerate(whole)
    }


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


class ModuleUnit:
    """The weights of a module: gathered, freed (then they read as NaN), scattered when all gradients are there."""

    def __init__(self, module: "nn.Module", all_units: list["ModuleUnit"]) -> None:
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
    units: list[ModuleUnit] = []
    for module in model:
        units.append(ModuleUnit(module, units))
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


zero3 = Part(
    "zero_3-5",
    "zero3",
    "A layer without its weight",
    "Write shard_of and Unit: a layer that gathers its weight in forward and backward and keeps none of it in between.",
    names=("shard_of", "Unit"),
    trials=(
        OnRanks(
            _sharded,
            (
                (1, [[0]], [2]),
                (2, [[0, 1]], [2]),
                (2, [[1, 0]], [2, 1]),
                (3, [[0, 1, 2]], [2]),
                (4, [[0, 2], [3, 1]], [1, 2]),
                (4, [[2, 0, 3, 1]], [2, 0, 1]),
            ),
            _one_process,
            "group(s) {1} of {0} rank(s), microbatches of {2} row(s)",
            _sharded_limits,
        ),
    ),
    right="two layers of 6 groups of 1 to 4 ranks: gradients of one process, two gathers and a scatter, no weight kept",
    minutes=45,
    points=4,
    hints=(
        "Unit is a torch.autograd.Function of five arguments. Its forward gathers the weight, calls fn, and saves x "
        "and the shard with ctx.save_for_backward; fn, shape and ranks are attributes of ctx.",
        "fn is any function, so that its backward is autograd's: gather again, and under torch.enable_grad() call "
        "fn(x, weight) with a detached x and weight that require gradients, then torch.autograd.grad(y, (x, weight), "
        "dy).",
        "whole = all_gather(shard.detach(), ranks)[: prod(shape)].view(shape) both times; backward returns dx, "
        "reduce_scatter(padded(dweight, len(ranks)), ranks), None, None, None. A shard is "
        "padded(weight.detach(), N).view(N, -1)[me].clone().requires_grad_().",
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
