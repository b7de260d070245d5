"""Judging weights that come and go: a layer that gathers its own, and hooks that gather a unit at the right moment."""

from collections.abc import Callable
from time import sleep
from typing import TYPE_CHECKING, Any

from dualpipe_course.differences import close
from dualpipe_course.exercise import Wrong
from dualpipe_course.trial import on_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

INS, HIDDEN, OUTS, ROWS, UNITS = 23, 17, 23, 2, 4  # weights of 17 x 23 and 23 x 17, far larger than activations
NUMBER = 8  # bytes


def check_linear(fn: Callable[..., Any], num_ranks: int) -> None:
    """Raise `Wrong` unless two layers of `fn(x, shard, out_features)` give the gradients of one process."""
    case = f"two layers on {num_ranks} rank(s)"
    results = on_ranks(_linear, num_ranks, fn, case=case)
    for rank, (found, expected, kept) in enumerate(results):
        for name, values in expected.items():
            if found[name] is None:
                raise Wrong(f"{case}: on rank {rank}, {name} is missing")
            if not close(found[name], values):
                raise Wrong(f"{case}: on rank {rank}, {name} is {_some(found[name])}, expected {_some(values)}")
        if num_ranks > 1 and kept > (enough := _enough(num_ranks)):
            raise Wrong(
                f"{case}: between forward and backward {kept:,} bytes stay that were not there before; activations and "
                f"shards are {enough:,} at most. W may not be kept, whole or in pieces; save the shard"
            )
    gathers = results.ledger.count("all_gather_single", 0) + results.ledger.count("all_gather", 0)
    if gathers != 4:
        raise Wrong(f"{case}: {gathers} all-gathers, expected 4: one in each forward and one in each backward")
    bound = 2 * 3 * (num_ranks - 1) * -(-INS * HIDDEN // num_ranks) * NUMBER
    if (sent := max(results.ledger.sent(rank=rank) for rank in range(num_ranks))) > bound:
        raise Wrong(f"{case}: a rank sent {sent} bytes; two gathers and a reduce-scatter of each weight send {bound}")


def _enough(num_ranks: int) -> int:
    """Bytes of all activations, twice, and of one copy of both shards."""
    return NUMBER * (2 * ROWS * (INS + 2 * HIDDEN + OUTS) + 2 * -(-INS * HIDDEN // num_ranks))


def check_connect(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless `fn(module, unit)` has each unit whole when it works and at no other time."""
    case = f"{UNITS} units, {num_ranks} rank(s), {num_microbatches} microbatch(es)"
    results = on_ranks(_connect, num_ranks, fn, num_microbatches, case=case)
    for rank, (found, expected, gathers, most, left, is_finite) in enumerate(results):
        for unit in reversed(range(UNITS)):
            if any(value != value for value in found[unit]):
                raise Wrong(
                    f"{case}: on rank {rank}, the gradients of unit {unit} are NaN: a weight was read while it was "
                    "away. In the backward, when is it gathered, and when is it needed?"
                )
            if not close(found[unit], expected[unit]):
                raise Wrong(f"{case}: on rank {rank}, the gradients of unit {unit} differ from those of one process")
        if most > 2:
            raise Wrong(f"{case}: {most} units were whole at once; free each after its forward")
        if gathers != (wanted := 2 * UNITS * num_microbatches):
            raise Wrong(f"{case}: {gathers} gathers, expected {wanted}: two for each unit and microbatch")
        if left:
            raise Wrong(f"{case}: {left} unit(s) are still whole after the last backward")
        if not is_finite:
            raise Wrong(f"{case}: a forward under torch.no_grad() gives NaN")


def _some(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values[:3]) + ", ..."


def _cut(whole: "Tensor", rank: int, world_size: int) -> "Tensor":
    from torch.nn.functional import pad

    return pad(whole.flatten(), (0, -whole.numel() % world_size)).view(world_size, -1)[rank].clone()


def _linear(rank: int, world_size: int, fn: Callable[..., Any]) -> tuple[Any, ...]:
    """One rank: gradients by name, what they should be, and what is kept between the passes."""
    import torch

    generator = torch.Generator().manual_seed(2)
    weights = [
        torch.randn(outs, ins, dtype=torch.float64, generator=generator)
        for outs, ins in ((HIDDEN, INS), (OUTS, HIDDEN))
    ]
    inputs = torch.randn(world_size, ROWS, INS, dtype=torch.float64, generator=generator)
    expected = _one_process(weights, inputs, rank, world_size)
    shards = [_cut(weight, rank, world_size).requires_grad_() for weight in weights]
    x = inputs[rank].clone().requires_grad_()
    weights.clear()
    y, kept = _watched(lambda: fn(torch.tanh(fn(x, shards[0], HIDDEN)), shards[1], OUTS), _enough(world_size))
    output = y.flatten().tolist()
    y.square().sum().backward()
    grads = {"x.grad": x.grad} | {f"shard.grad of layer {i + 1}": shard.grad for i, shard in enumerate(shards)}
    found = {name: None if grad is None else grad.flatten().tolist() for name, grad in grads.items()}
    return {"the output": output} | found, expected, kept


def _one_process(weights: Any, inputs: "Tensor", rank: int, world_size: int) -> dict[str, list[float]]:
    import torch

    whole = [weight.clone().requires_grad_() for weight in weights]
    parts = [part.clone().requires_grad_() for part in inputs]
    outputs = [torch.tanh(part @ whole[0].t()) @ whole[1].t() for part in parts]
    for y in outputs:
        y.square().sum().backward()
    expected = {"the output": outputs[rank], "x.grad": parts[rank].grad}
    for index, weight in enumerate(whole):
        expected[f"shard.grad of layer {index + 1}"] = _cut(weight.grad, rank, world_size)
    return {name: values.flatten().tolist() for name, values in expected.items()}


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


def _connect(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> tuple[Any, ...]:
    """One rank: gradients by unit, what they should be, gathers, units whole at once, units left whole, evaluation."""
    import torch

    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(num_microbatches, world_size, 3, 5, dtype=torch.float64, generator=generator)
    judge, model = _model(), _model()
    judge(inputs.flatten(0, 2)).square().sum().backward()
    expected = [
        _cut(torch.cat([p.grad.flatten() for p in module.parameters()]), rank, world_size).tolist() for module in judge
    ]
    units: list[Unit] = []
    for module in model:
        units.append(Unit(module, units))
        fn(module, units[-1])
    for microbatch in inputs[:, rank]:
        x = microbatch.clone().requires_grad_()  # or torch warns that a backward hook of the first unit has no inputs
        model(x).square().sum().backward()
    gathers, left = sum(unit.num_gathers for unit in units), sum(unit.is_whole for unit in units)
    most = max(unit.most_whole for unit in units)
    with torch.no_grad():
        is_finite = bool(model(inputs[0, rank]).isfinite().all())
    return [unit.grad.tolist() for unit in units], expected, gathers, most, left, is_finite
