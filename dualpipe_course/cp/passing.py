"""Blocks of keys that come once: each is spoilt when the next one is asked for, and what is alive then is noted.

Chapters: book/cp/online-softmax, book/cp/flash-attention.  In: blocks, as tuples of tensors.  Out: the same, one by
one; a list that grows by the bytes of all tensors alive after each block.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

SPOILT = "numbers are overwritten with NaN once the next one is asked for"


def once(blocks: "Iterable[tuple[Tensor, ...]]", alive: list[int]) -> "Iterator[tuple[Tensor, ...]]":
    """Hand out blocks one by one; what is handed out turns to NaN when the next one is asked for."""
    import torch

    from dualpipe_lab.dp.measure import live_tensors, storage_bytes

    alive.append(0)
    for block in blocks:
        yield block
        for tensor in block:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        del block, tensor
        alive.append(storage_bytes(live_tensors()))


def check_once(case: str, what: str, number: int, alive: list[int], known: str) -> None:
    """Raise `Wrong` unless all blocks were asked for, and as much is alive after the last as after two.

    Args:
        case: the case, in words.
        what: what a block is called, in the plural.
        number: how many there are.
        alive: what `once` has noted.
        known: what an answer may carry from block to block, in words.
    """
    if len(alive) - 1 != number:
        raise Wrong(f"{case}: {max(len(alive) - 1, 0)} of {number} {what} were asked for")
    if len(alive) > 4 and alive[-1] > alive[2]:
        raise Wrong(
            f"{case}: tensors of {alive[2]:,} bytes are alive after two {what} and {alive[-1]:,} at the end; {known}"
        )
