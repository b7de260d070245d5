"""Pickled calls and results: functions by value (cloudpickle), because another process cannot import what a cell holds.

Tensors travel without the unused part of their storage, and results as bytes over one pipe per rank.
"""

import inspect
import io
import linecache
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from dualpipe_lab.launch import restricted

SPOOL_BYTES = 8 * 2**20  # above this a copy per rank through a pipe is slower than one file, and worth a warning


def dumps(value: object) -> bytes:
    """Pickle by value; of a tensor that is a view, only the elements of the view."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Inverse of `dumps`; inside `data_only` it raises `restricted.Refused` for anything but data."""
    if _opens_data_only:
        return restricted.loads(data)
    return pickle.loads(data)  # noqa: S301  both ends are this user's own processes


def receive(channel: "Connection[Any, Any]") -> Any:
    """Receive and unpickle the next message of a rank, as `loads` does."""
    return loads(channel.recv_bytes())


@contextmanager
def data_only() -> Iterator[None]:
    """Unpickle only data that ranks send, and run no code: for the process that evaluates submissions.

    It applies to the process and not to one launch, because checks call `launch` themselves.
    """
    global _opens_data_only
    before, _opens_data_only = _opens_data_only, True
    try:
        yield
    finally:
        _opens_data_only = before


_opens_data_only = False


def check_call(fn: Callable[..., object], world_size: int, args: tuple[object, ...]) -> None:
    """Raise TypeError unless `fn(rank, world_size, *args)` can be called."""
    if not callable(fn):
        raise TypeError(f"launch runs a function fn(rank, world_size, *args), got {type(fn).__name__}")
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return  # some builtins have none
    try:
        signature.bind(0, world_size, *args)
    except TypeError as error:
        raise TypeError(
            f"launch calls {_name(fn)}(rank, world_size{', *args' * bool(args)}) with {len(args)} further arguments, "
            f"but {_name(fn)}{signature} does not fit: {error}"
        ) from None


def pack_call(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Pickle a call for the ranks.

    Raises:
        TypeError: `fn` uses an object that cannot be pickled: a lock, an open file, a generator.
    """
    if (main := sys.modules.get("__mp_main__")) is not None:  # the caller's script, by its name in a spawned worker
        cloudpickle.register_pickle_by_value(main)
    try:
        return dumps((fn, args))
    except Exception as error:
        name = _name(fn)
        raise TypeError(
            f"{name} and what it uses must be copied to the ranks, but {error}; create such objects inside {name}"
        ) from error


def spool(data: bytes, folder: Path, fn: Callable[..., object], args: tuple[object, ...]) -> bytes | Path:
    """Write a payload above `SPOOL_BYTES` to one file in `folder` and warn; return small ones unchanged."""
    if len(data) <= SPOOL_BYTES:
        return data
    culprit = _largest(fn, args)
    warnings.warn(
        f"launch copies {len(data) / 2**20:.0f} MB to every rank{culprit}; "
        "create large tensors inside the function, or load them there from a file",
        stacklevel=4,
    )
    path = folder / "call.pickle"
    path.write_bytes(data)
    return path


def cell_sources() -> dict[str, list[str]]:
    """Source lines of notebook cells and other code that is not on disk, by file name."""
    return {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not name.startswith("<frozen") and not os.path.exists(name)
    }


def install_sources(sources: dict[str, list[str]]) -> None:
    """Store the cells' source lines in this process, for its tracebacks."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _name(fn: Callable[..., object]) -> str:
    return str(getattr(fn, "__name__", repr(fn)))


def _largest(fn: Callable[..., object], args: tuple[object, ...]) -> str:
    """Words for the warning: the largest object that `fn` captures."""
    named: dict[str, object] = {f"argument {position}": value for position, value in enumerate(args)}
    if isinstance(fn, types.FunctionType):
        captured = inspect.getclosurevars(fn)
        named |= dict(captured.globals) | dict(captured.nonlocals)
    sizes = {name: getattr(value, "nbytes", 0) for name, value in named.items()}
    name = max(sizes, key=lambda key: sizes[key] if isinstance(sizes[key], int) else 0, default="")
    return f" (the largest is {name}, {sizes[name] / 2**20:.0f} MB)" if name and sizes[name] else ""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with dense tensors as bytes of the CPU: 5-14 times quicker and never more than the tensor itself."""

    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules.get("torch")  # without torch there are no tensors
        if torch is not None and type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_meta:
            if obj.device.type != "cpu":  # a notebook has no use for a rank's GPU
                obj = obj.detach().cpu().requires_grad_(obj.requires_grad)
            if obj.is_quantized or obj.is_conj() or obj.is_neg():
                obj = obj.detach().clone()
            raw = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _rebuild, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape), obj.requires_grad)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(obj, (numpy.ndarray, numpy.generic)) and obj.dtype.kind in _PLAIN_KINDS:
            if type(obj) is numpy.ndarray:
                order = "F" if obj.flags.fnc else "C"
                return _rebuild_array, (bytearray(obj.tobytes(order)), obj.dtype.str, obj.shape, order)
            if isinstance(obj, numpy.generic):
                return _rebuild_scalar, (obj.tobytes(), obj.dtype.str)
        return super().reducer_override(obj)


_PLAIN_KINDS = "biufcSU"  # numpy's booleans, numbers and text: what bytes and the name of a type describe


def _rebuild(raw: bytearray | bytes, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    byte = torch.uint8
    flat = torch.frombuffer(bytearray(raw), dtype=byte) if raw else torch.empty(0, dtype=byte, device="cpu")
    return flat.view(dtype).reshape(shape).requires_grad_(requires_grad)


def _rebuild_array(raw: bytearray, dtype: str, shape: tuple[int, ...], order: str) -> Any:
    import numpy

    return numpy.frombuffer(raw, _plain(dtype)).reshape(shape, order=order)  # type: ignore[call-overload]


def _rebuild_scalar(raw: bytes, dtype: str) -> Any:
    import numpy

    return numpy.frombuffer(raw, _plain(dtype))[0]


def _plain(dtype: str) -> Any:
    """Numpy's type of that name; ValueError for one that could hold objects."""
    import numpy

    found = numpy.dtype(dtype)
    if found.kind not in _PLAIN_KINDS:
        raise ValueError(f"{dtype} is no type of plain numbers or text")
    return found
