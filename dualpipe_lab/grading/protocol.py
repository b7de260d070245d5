"""How answers reach the judge: plain values as JSON, functions as bytes that the judge never opens.

Unpickling runs code, so nothing from the worker is unpickled in the judge: a rank opens the sealed function.  What
that rank sends back is a pickle, which the judge opens as data only (`world.restricted`).
"""

import base64
import json
from typing import Any

from dualpipe_lab.world import payload

MAX_BYTES = 20_000_000
MAX_DEPTH = 20


class SealedFunction:
    """A learner's function that can be sent to ranks, but not called here."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the judge runs none of the learner's code."""
        raise TypeError("a submitted function runs on ranks only")

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return payload.loads, (self._data,)


def pack(value: object) -> Any:
    """Make JSON of an answer; a value that is not plain becomes the name of its type."""
    plain = _plain(value, 0)
    if plain is not None:
        return {"plain": plain}
    if callable(value):
        try:
            return {"function": base64.b64encode(payload.dumps(value)).decode()}
        except Exception as error:
            return {"error": f"the function cannot be copied to other processes: {error}"}
    return {"strange": type(value).__name__[:100]}


def unpack(packed: Any) -> Any:
    """The inverse of `pack`; ValueError for what `pack` does not make."""
    match packed:
        case {"plain": value}:
            return _restore(value)
        case {"function": str(data)}:
            return SealedFunction(base64.b64decode(data))
        case {"strange": str(name)}:
            return type(name, (), {})()
    raise ValueError("the worker sent something else than an answer")


def encode(message: object) -> bytes:
    """JSON in bytes."""
    return json.dumps(message).encode()


def _plain(value: object, depth: int) -> Any:
    """Exact types only: a subclass of int may claim to equal everything."""
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
