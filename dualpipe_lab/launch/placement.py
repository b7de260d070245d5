"""Placement: the arguments of a launch on the device of the rank.

In: nested lists, tuples and dicts with tensors and modules.  Out: the same with the tensors on one device.
The way back needs no placement: tensors travel as bytes and are rebuilt on the CPU (`payload`).
Elsewhere: `torch.utils.data` pin_memory and Lightning's `move_data_to_device` walk nested values in the same way.
"""

from typing import Any

import torch
from torch import Tensor, nn


def place(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor and module in its lists, tuples and dicts on `device`.

    A tensor that occurs twice is one tensor afterwards too; a leaf stays a leaf, a parameter a parameter.  Modules are
    moved in place; other objects are returned as they are.
    """
    return _place(value, device, {})


def _place(value: Any, device: torch.device, placed: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        return value.to(device)
    if isinstance(value, Tensor):
        if id(value) not in placed:
            placed[id(value)] = _place_tensor(value, device)
        return placed[id(value)]
    if isinstance(value, dict):  # in place: the constructor of an ordered or a default dict may need more
        value.update([(key, _place(part, device, placed)) for key, part in value.items()])
        return value
    if isinstance(value, tuple):
        parts = [_place(part, device, placed) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        value[:] = [_place(part, device, placed) for part in value]
    return value


def _place_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)
