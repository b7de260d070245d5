"""The largest difference between two nested results, and its place.

In: tensors, numbers, and lists, tuples and dicts of them.  Out: a number, and a place such as `[1]["loss"]`.
Elsewhere: `torch.testing.assert_close`, which stops at the first difference and tells sizes apart by type.
"""

from collections.abc import Iterator
from math import inf, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Difference(NamedTuple):
    """A difference between two results: its size, its place in them, and in words where it is no number."""

    size: float
    place: str
    text: str = ""


def largest_difference(left: Any, right: Any) -> Difference:
    """Return the largest absolute difference of two nested results; infinite if their structure or a word differs.

    NaN equals NaN, and an infinity the same infinity.

    >>> largest_difference({"loss": 1.0, "ranks": [1, 2]}, {"loss": 1.5, "ranks": [1, 2]})
    Difference(size=0.5, place='["loss"]', text='')
    """
    return max(_differences(left, right, ""), key=lambda one: one.size, default=Difference(0.0, ""))


def _differences(left: Any, right: Any, place: str) -> Iterator[Difference]:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        yield _of_tensors(left.detach(), right.detach(), place)
    elif _is_number(left) and _is_number(right):
        yield Difference(_of_numbers(left, right), place)
    elif isinstance(left, dict) and isinstance(right, dict) and list(left) == list(right):
        for key in left:
            yield from _differences(left[key], right[key], f"{place}[{_quoted(key)}]")
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from _differences(*pair, f"{place}[{index}]")
    elif type(left) is not type(right) or bool(left != right):
        yield Difference(inf, place, f"{_short(left)} against {_short(right)}")


def _of_tensors(left: Tensor, right: Tensor, place: str) -> Difference:
    if left.shape != right.shape or left.dtype != right.dtype:
        return Difference(inf, place, f"{left.dtype} {tuple(left.shape)} against {right.dtype} {tuple(right.shape)}")
    if not left.numel():
        return Difference(0.0, place)
    wide = torch.complex128 if left.is_complex() else torch.float64
    first, second = left.cpu().to(wide), right.cpu().to(wide)
    equal = (first == second) | (first.isnan() & second.isnan())
    apart = torch.where(equal, 0.0, (first - second).abs()).nan_to_num(nan=inf, posinf=inf)
    index = int(apart.argmax())
    where = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(index), left.shape)) if left.dim() else ""
    return Difference(float(apart.view(-1)[index]), f"{place}[{where}]" if where else place)


def _of_numbers(left: Any, right: Any) -> float:
    if left == right or (isnan(left) and isnan(right)):
        return 0.0
    apart = abs(left - right)
    return inf if isnan(apart) else float(apart)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quoted(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
