"""The types of the arrays in a compact program, and the numbers of its kinds of work."""

from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_lab.pp.program import WORK_KINDS, B, F, I, W

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ints: TypeAlias = "NDArray[np.integer[Any]]"
Flags: TypeAlias = "NDArray[np.bool]"
Numbers: TypeAlias = "NDArray[np.number[Any]]"

NUMBER = {kind: number for number, kind in enumerate(WORK_KINDS)}  # F: 0, B: 1, I: 2, W: 3
IS_F, IS_B, IS_I, IS_W = NUMBER[F], NUMBER[B], NUMBER[I], NUMBER[W]
