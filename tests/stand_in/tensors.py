"""Tensors of the device: memory of the CPU whose storage carries a mark.

The mark stays with the storage, so views, `out=`, `.data`, `untyped_storage().resize_`, saved tensors and optimizers
behave as ever.  One mode answers for the functions of Python (`device=`, `.to`, `.device`, `.numpy()`), another sees
every operation below them, also those of a backward: it marks results and refuses to mix device and host.
"""

import sys
from contextlib import contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from stand_in import nccl

DEVICE_RNG = "Expected a 'cuda' device type for generator but found 'cpu'"
aten = torch.ops.aten
# operations that CUDA allows between device and host
CROSSES = {
    aten.copy_.default,
    aten._foreach_copy_.default,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
}
INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
           aten._unsafe_index.Tensor, aten._unsafe_index_put.default}  # fmt: skip
SET_GRAD = torch.Tensor.grad.__set__
NO_HOST_MEMORY = {torch.Tensor.numpy, torch.Tensor.__array__}


def is_on_device(tensor):
    """Whether the memory of a tensor carries the mark."""
    try:
        return getattr(torch._C.TensorBase.untyped_storage(tensor), "on_device", False)
    except (RuntimeError, NotImplementedError):  # no storage
        return False


def mark(tensor, on_device=True):
    """Say where the memory of a tensor is."""
    if not tensor.is_meta:
        torch._C.TensorBase.untyped_storage(tensor).on_device = on_device
    return tensor


def tensors_in(*values):
    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]


def mixed(name, device):
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {device} and cpu! "
        f"(when checking arguments of {name})"
    )


class Transfer(torch.autograd.Function):
    """A copy to the other side, and of the gradient back."""

    @staticmethod
    def forward(ctx, tensor, on_device):
        ctx.back = is_on_device(tensor)
        return mark(tensor.clone(), on_device)

    @staticmethod
    def backward(ctx, grad):
        return (grad if is_on_device(grad) == ctx.back else mark(grad.clone(), ctx.back)), None


class Operations(TorchDispatchMode):
    """Every operation that reaches a kernel."""

    def __init__(self, device, suite):
        super().__init__()
        self.device, self.suite = device, suite
        self.makes_on_device = False  # what torch itself makes inside a call on tensors of the device

    @contextmanager
    def inside(self, on_device):
        before, self.makes_on_device = self.makes_on_device, on_device
        try:
            yield
        finally:
            self.makes_on_device = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return nccl.run(func, args, kwargs, is_on_device, tensors_in)
        if func is aten.detach.default and not isinstance(args[0], torch.Tensor):
            args = (torch.tensor(args[0], dtype=torch.float64),)  # torch hands a mode a number where one was wrapped
        given = tensors_in(args, kwargs)
        on_device = [tensor for tensor in given if is_on_device(tensor)]
        if on_device:
            self.check(func, args, kwargs, given, on_device)
        result = func(*args, **kwargs)
        if (on_device and func not in CROSSES) or (self.makes_on_device and not given):
            for tensor in tensors_in(result):
                mark(tensor)
        return result

    def check(self, func, args, kwargs, given, on_device):
        """Refuse what CUDA refuses: arguments of both sides, unless those of the host are single numbers."""
        if kwargs.get("generator") is not None and not (self.suite and called_by_test()):
            raise RuntimeError(DEVICE_RNG)
        if func in CROSSES or len(given) == len(on_device):
            return
        if func in INDEXES:
            if not is_on_device(args[0]):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            given = tensors_in(args[2:])
        if any(tensor.dim() and not is_on_device(tensor) for tensor in given):
            raise mixed(func, self.device)


class Functions(TorchFunctionMode):
    """The functions of Python that name a device."""

    def __init__(self, operations):
        super().__init__()
        self.operations, self.device, self.suite = operations, operations.device, operations.suite
        self.constructors = _device_constructors()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in GETTERS:
            return GETTERS[func](self, args[0]) if is_on_device(args[0]) else func(*args, **kwargs)
        if func == SET_GRAD:
            return self.set_grad(func, *args)
        if func in NO_HOST_MEMORY and is_on_device(args[0]):
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if func in MOVES:
            return MOVES[func](self, *args, **kwargs)
        if func is torch.Tensor.__deepcopy__ or (func is torch.Tensor.new_tensor and kwargs.get("device") is None):
            return mark(func(*args, **kwargs), is_on_device(args[0]))
        if kwargs.get("device") is not None or func in self.constructors:
            with self.operations.inside(False):
                return self.construct(func, args, kwargs)
        with self.operations.inside(any(map(is_on_device, tensors_in(args, kwargs)))):
            return func(*args, **kwargs)

    def construct(self, func, args, kwargs):
        """Run a function that makes a tensor on the device that it names, or on the default one."""
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        if asked is not None:
            on_device = self.is_mine(asked)
            kwargs["device"] = "cpu"
            if on_device and kwargs.get("generator") is not None:
                raise RuntimeError(DEVICE_RNG)
        else:
            on_device = self.suite and called_by_test()
        given = tensors_in(args, kwargs)
        if func in (torch.as_tensor, torch.asarray) and given:
            moved = func(*args, **{**kwargs, "device": None})
            return moved if asked is None else self.moved(moved, on_device)
        result = func(*args, **kwargs)
        if asked is not None or (on_device and not given):
            for tensor in tensors_in(result):
                mark(tensor, on_device)
        return result

    def is_mine(self, asked):
        place = torch.device(asked)
        if place.type == "cuda" and place.index not in (None, self.device.index):
            raise RuntimeError(f"a rank has one device, {self.device}, got {place}")
        return place.type == "cuda"

    def moved(self, tensor, on_device):
        return tensor if is_on_device(tensor) == on_device else Transfer.apply(tensor, on_device)

    def to(self, tensor, *args, **kwargs):
        """`to(device, dtype, non_blocking, copy)`, `to(dtype)`, `to(other)`."""
        asked, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        copies = kwargs.pop("copy", False)
        for value in args:
            if isinstance(value, torch.Tensor):
                asked, dtype = "cuda" if is_on_device(value) else "cpu", value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, str | torch.device):
                asked = value
            elif isinstance(value, int) and not isinstance(value, bool):
                asked = torch.device("cuda", value)
        if asked is not None and torch.device(asked).type not in ("cpu", "cuda"):
            return torch.Tensor.to(tensor, asked, dtype)
        cast = torch.Tensor.to(tensor, dtype or tensor.dtype, copy=copies)
        return cast if asked is None else self.moved(cast, self.is_mine(asked))

    def set_grad(self, func, tensor, grad):
        if grad is not None and is_on_device(grad) != is_on_device(tensor):
            raise RuntimeError("assigned grad has data located on a different device")
        return func(tensor, grad)


GETTERS = {
    torch.Tensor.device.__get__: lambda mode, tensor: mode.device,
    torch.Tensor.is_cuda.__get__: lambda mode, tensor: True,
    torch.Tensor.is_cpu.__get__: lambda mode, tensor: False,
    torch.Tensor.get_device: lambda mode, tensor: mode.device.index,
}
MOVES = {
    torch.Tensor.to: Functions.to,
    torch.Tensor.cuda: lambda mode, tensor, device=None, **_: mode.moved(tensor, True),
    torch.Tensor.cpu: lambda mode, tensor, **_: mode.moved(tensor, False),
}


def called_by_test():
    """Whether the first frame outside of torch and of this folder is not the library's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/stand_in/" not in name and "<frozen" not in name:
            return "/dualpipe_lab/" not in name
        frame = frame.f_back
    return False


def enter(local_rank, suite):
    """Look at every operation of this process from now on; what a test handed to its ranks is on the device."""
    device = torch.device("cuda", local_rank)
    operations = Operations(device, suite)
    functions = Functions(operations)
    operations.__enter__()
    functions.__enter__()
    _watch_backward(functions)
    if suite:
        _mark_first_call()


def _watch_backward(functions):
    """`Tensor.backward` leaves the mode for as long as it runs, but calls hooks and functions written in Python."""
    run = torch.autograd._engine_run_backward

    def run_watched(*args, **kwargs):
        active = torch.overrides._get_current_function_mode() is functions
        on_device = any(map(is_on_device, tensors_in(args)))
        with functions.operations.inside(on_device), nullcontext() if active else functions:
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_watched


def _mark_first_call():
    from dualpipe_lab.launch import payload

    loads, rebuild = payload.loads, payload._rebuild

    def loads_call(data):
        payload.loads, payload._rebuild = loads, lambda *args: mark(rebuild(*args))
        try:
            return loads(data)
        finally:
            payload._rebuild = rebuild

    payload.loads = loads_call
