"""The form of answers between worker and evaluator: plain values as JSON, functions as opaque bytes.

In: values of the learner's names.  Out: JSON, and values again in the evaluator.
Unpickling runs code, so the evaluator unpickles nothing from the worker: a rank unpickles the sealed function.  The
result of that rank is a pickle, which the evaluator reads as data only (`world.restricted`).
"""

import base64
import json
from typing import Any

from dualpipe_course.grading import guard
from dualpipe_lab.launch import payload

MAX_BYTES = 20_000_000
MAX_DEPTH = 20


class SealedFunction:
    """A learner's function that can be sent to ranks but not called in this process."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise TypeError: the evaluator does not run the learner's code."""
        raise TypeError("a submitted function runs on ranks only")

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return open_on_rank, (self._data,)


def seal_calls() -> None:
    """Guard the ranks of every launch in this process, too."""
    pack_call = payload.pack_call
    payload.pack_call = lambda fn, args: payload.dumps(SealedFunction(pack_call(fn, args)))


def open_on_rank(data: bytes) -> Any:
    """Return a sealed function, in a process that is guarded from then on."""
    guard.close()
    return payload.loads(data)


def pack(value: object) -> Any:
    """Return an answer as JSON values; a value that is neither plain nor callable becomes the name of its type."""
    plain = _plain(value, 0)
    if plain is not None:
        try:
            json.dumps(plain)
        except ValueError as error:  # an int of more digits than Python prints
            return {"error": f"the answer holds a number that is too long: {error}"}
        return {"plain": plain}
    if callable(value):
        try:
            return {"function": base64.b64encode(payload.dumps(value)).decode()}
        except Exception as error:
            return {"error": f"the function cannot be copied to other processes: {error}"}
    return {"strange": type(value).__name__[:100]}


def unpack(packed: Any) -> Any:
    """Return the value that `pack` wrote; ValueError for any other JSON value."""
    match packed:
        case {"plain": value}:
            return _restore(value)
        case {"function": str(data)}:
            return SealedFunction(base64.b64decode(data))
        case {"strange": str(name)}:
            return type(name, (), {})()
    raise ValueError("the worker sent something else than an answer")


def encode(message: object) -> bytes:
    """Return a message as JSON in bytes."""
    return json.dumps(message).encode()


def _plain(value: object, depth: int) -> Any:
    """Accept exact types only: a subclass of int could define `==` as always true."""
    if depth > MAX_DEPTH:
        return None
    if value is ...:
        return {"dots": True}
    if value is None:
        return {"none": True}
    if type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        parts = [_plain(part, depth + 1) for part in value]  # type: ignore[attr-defined]
        return None if None in parts else {type(value).__name__: parts}
    return None


def _restore(value: Any) -> Any:
    match value:
        case {"dots": True}:
            return ...
        case {"none": True}:
            return None
        case {"list": list(parts)}:
            return [_restore(part) for part in parts]
        case {"tuple": list(parts)}:
            return tuple(_restore(part) for part in parts)
        case bool() | int() | float() | str():
            return value
    raise ValueError("the worker sent something else than an answer")
