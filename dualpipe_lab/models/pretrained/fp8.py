"""Weights in fp8 with a scale for each block, as DeepSeek-V3's: read in slices, and multiplied by their scales.

Chapter: book/whole/weights.  In: a slice of a weight and the scales of its blocks.  Out: the weight in float32.
  in files   X.weight in float8_e4m3fn, and X.weight_scale_inv in float32, one number for each block of a x b
  weight     w_ij = q_ij s_mn,   m = i // a, n = j // b;   the last block of an axis may be smaller
  a slice    i from i0 to i1 needs the scales from i0 // a to ceil(i1 / a), wherever the slice begins
  bytes      1 + 4 / (a b) per number of a weight, instead of the 2 of bfloat16
  memory     the slice as it is stored and once more in float32, 5 bytes per number
Nothing is written in fp8.
Elsewhere: DeepSeek-V3 inference/fp8_cast_bf16.py, for full weights; transformers `FineGrainedFP8Config`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.3.2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualpipe_lab.models.pretrained.fp8_blocks import Blocks

TYPE, SCALE_TYPE, SCALE = torch.float8_e4m3fn, torch.float32, "_scale_inv"


def dequantise(weight: Tensor, scale: Tensor, where: Sequence[slice], blocks: Blocks) -> Tensor:
    """Return a slice of a weight, `w_RC` in float32.

    Args:
        weight: `q_RC`, the slice as it is stored.
        scale: of the blocks in which the slice lies, `blocks.scale_slices(where)` of all.
        where: the slice.
        blocks: rows and columns of a block.

    >>> weight, scale = torch.ones(3, 1), torch.tensor([[2.0], [4.0]])
    >>> dequantise(weight.to(TYPE), scale, (slice(3, 6), slice(0, 1)), Blocks(4, 4)).T
    tensor([[2., 4., 4.]])
    """
    found = weight.to(SCALE_TYPE)
    rows, columns = where
    number = torch.arange(columns.start, columns.stop) // blocks.columns - columns.start // blocks.columns
    begin = rows.start // blocks.rows * blocks.rows - rows.start  # of the first block, at or before the slice
    for place, scales in enumerate(scale):
        start = begin + place * blocks.rows
        found[max(start, 0) : start + blocks.rows] *= scales[number]
    return found
