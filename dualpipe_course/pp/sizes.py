"""Trying a builder of programs on many sizes, the smallest first."""

from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course.exercise import Wrong
from dualpipe_course.pp import gradients
from dualpipe_course.trial import call_each, ended, needs_function

Size = tuple[int, ...]


def try_sizes(fn: Callable[..., Any], sizes: Sequence[Size], units: Sequence[str], check: Callable[..., None]) -> int:
    """Call the learner's builder on every size without the library's; `check(answer, *size)` raises `Wrong`.

    The smallest size that fails is named.  Returns how many there were.
    """
    needs_function(fn)
    sizes = sorted(sizes, key=lambda size: (sum(size), size))
    results = call_each(gradients.without_library(fn), sizes)
    for size, (fine, value) in zip(sizes, results, strict=True):
        case = ", ".join(f"{number} {unit}" for number, unit in zip(size, units, strict=True))
        if not fine:
            raise Wrong(ended(case, value))
        try:
            check(value, *size)
        except Wrong as wrong:
            raise Wrong(f"{case}: {wrong.message}", picture=wrong.picture) from None
    return len(sizes)
