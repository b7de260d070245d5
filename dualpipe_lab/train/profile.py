"""`profile_modules`: parameters, bytes kept for the backward, and seconds of each submodule of a model in a step.

Chapter: book/tp/block.  In: a module, a function that runs its forward and backward.  Out: rows that print as a table.
  kept       storages that autograd saves in a module's forward, but for parameters and buffers.  Each counts for the
             module that saves it first and for those around it, so the parts are never larger than the whole
  backward   the nodes of autograd that the forward makes, each for the module that makes it and for those around it
Calls add up.  What a step does outside of the module, such as a loss, is in no row.  What a recomputed part keeps is
not seen, and its second forward is a further call.
Elsewhere: TorchDistPackage's module profiler; `torch.profiler` with `with_modules`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dualpipe_lab._private import tree_leaves, version_of
from dualpipe_lab.launch import accelerator


@dataclass
class ModuleCosts:
    """What one submodule costs in a step, times in seconds."""

    name: str
    parameters: int
    calls: int = 0
    kept_bytes: int = 0
    forward: float = 0.0
    backward: float = 0.0


class ModuleProfile(list[ModuleCosts]):
    """The rows of a module and of its submodules, in the order in which the model has them."""

    def __str__(self) -> str:
        width = max(len(row.name) for row in self)
        lines = [f"{'':{width}} calls  parameters   kept bytes     F ms     B ms"]
        for row in self:
            counts = f"{row.calls:5} {row.parameters:11,} {row.kept_bytes:12,}"
            lines.append(f"{row.name:{width}} {counts} {1e3 * row.forward:8.2f} {1e3 * row.backward:8.2f}")
        return "\n".join(lines)


def profile_modules(module: nn.Module, step: Callable[[], object], depth: int | None = None) -> ModuleProfile:
    """Return a row for the module, and one for each of its submodules that a step calls.

    Args:
        module: a model, or a part of it.
        step: runs the forward and the backward.  A first step is slower, so run one before.
        depth: how many parts a submodule's name has at most; None for all submodules.

    Raises:
        ValueError: the step calls neither the module nor one of these submodules.

    >>> from torch import ones
    >>> model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh())
    >>> rows = profile_modules(model, lambda: model(ones(2, 4)).sum().backward())
    >>> [(row.name, row.calls, row.parameters, row.kept_bytes) for row in rows]
    [('Sequential', 1, 32, 96), ('0', 1, 32, 32), ('1', 1, 0, 64)]
    """
    profiler = _Profiler(module)
    for name, part in module.named_modules():
        if depth is None or len(name.split(".")) * bool(name) <= depth:
            profiler.watch(part, ModuleCosts(name or type(module).__name__, sum(p.numel() for p in part.parameters())))
    try:
        with saved_tensors_hooks(profiler.pack, _Packed.unpack):
            step()
    finally:
        for handle in profiler.handles:
            handle.remove()
    if profiler.device is not None:
        profiler.device.synchronize()
    for rows, name, begin, end in profiler.spans:
        seconds = end - begin if profiler.device is None else begin.elapsed_time(end) / 1e3
        for row in rows:
            setattr(row, name, getattr(row, name) + seconds)
    if not any(row.calls for row in profiler.rows):
        raise ValueError(f"step calls no part of {type(module).__name__} down to depth {depth}; it runs the module")
    return ModuleProfile(row for row in profiler.rows if row.calls)


class _Packed(list[Tensor]):
    """A tensor that autograd has saved, until the backward drops it."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__([tensor])
        self.version = version_of(tensor)

    def unpack(self) -> Tensor:
        if version_of(self[0]) != self.version:  # torch's own check ends where hooks begin
            raise RuntimeError("a tensor that the backward needs has been modified by an in-place operation")
        return self[0]


class _Profiler:
    def __init__(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        self.ignored = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.device = accelerator.current() if any(tensor.device.type != "cpu" for tensor in tensors) else None
        self.saved = WeakValueDictionary[int, _Packed]()  # by the place of the storage
        self.calls = list[tuple[ModuleCosts, Any, set[Any]]]()  # not yet returned: row, begin, nodes of the inputs
        self.rows, self.handles, self.nodes = list[ModuleCosts](), list[Any](), set[Any]()
        self.spans = list[tuple[list[ModuleCosts], str, Any, Any]]()

    def watch(self, part: nn.Module, row: ModuleCosts) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            row.calls += 1
            self.calls.append((row, self.mark(), _nodes((args, kwargs))))

        self.rows.append(row)
        self.handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
        # also after an error, which the module around may catch
        self.handles.append(part.register_forward_hook(lambda part, args, out: self.leave(out), always_call=True))

    def leave(self, output: Any) -> None:
        rows, (_, begin, older) = [row for row, *_ in self.calls], self.calls.pop()
        todo = _nodes(output) - older
        while todo:
            node = todo.pop()
            older.add(node)
            todo |= {parent for parent, _ in node.next_functions if parent} - older
            if node not in self.nodes:  # else that of a module inside
                self.time_backward(node, rows)
        self.spans.append((rows[-1:], "forward", begin, self.mark()))

    def time_backward(self, node: Any, rows: list[ModuleCosts]) -> None:
        begins: list[Any] = []
        end = lambda *grads: self.spans.append((rows, "backward", begins.pop(), self.mark()))  # noqa: E731
        self.nodes.add(node)
        self.handles += [node.register_prehook(lambda grads: begins.append(self.mark())), node.register_hook(end)]

    def pack(self, tensor: Tensor) -> _Packed:
        packed, storage = _Packed(tensor), tensor.untyped_storage()
        if storage.data_ptr() not in self.ignored and self.saved.setdefault(storage.data_ptr(), packed) is packed:
            for row, *_ in self.calls:
                row.kept_bytes += storage.nbytes()
        return packed

    def mark(self) -> Any:
        if self.device is None:
            return perf_counter()
        event = self.device.event()
        event.record()
        return event


def _nodes(value: Any) -> set[Any]:
    return {one.grad_fn for one in tree_leaves(value) if isinstance(one, Tensor) and one.grad_fn}
