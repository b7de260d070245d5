"""Bytes that tensors hold, measured rather than derived.

Chapter: book/dp/zero-1.  In: nothing, or tensors.  Out: bytes.
Each storage counts once, however many tensors are views of it.  A buffer whose storage was freed counts 0 bytes.
"""

import gc
import os
from collections.abc import Iterable
from time import sleep

from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of some tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def live_tensors() -> list[Tensor]:
    """Return every tensor that this process can reach, gradients included."""
    while gc.collect():
        pass  # a tensor that C++ and Python both hold takes several rounds
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def live_bytes() -> int:
    """Return the bytes of all tensors of this process; take the difference of two readings.

    A `gc.freeze()` beforehand makes readings fast: objects that exist at that time are left out of both.
    """
    reading = -1
    # a back end's thread holds the tensors of a collective until it has run once more, later on a busy machine
    pause = 0.02 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    while reading != (again := storage_bytes(live_tensors())):
        reading = again
        sleep(pause)
    return reading
