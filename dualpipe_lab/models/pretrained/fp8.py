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

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

TYPE, SCALE_TYPE, SCALE = torch.float8_e4m3fn, torch.float32, "_scale_inv"
_KNOWN = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),  # how activations would be quantised: no part of the weights
}
_LISTS = ("weight_block_size", "modules_to_not_convert")


class Blocks(NamedTuple):
    """Rows and columns of a block, which has one scale."""

    rows: int
    columns: int

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight.

        >>> Blocks(128, 128).scale_shape((576, 7168))
        (5, 56)
        """
        return tuple(-(-size // block) for size, block in zip(shape, self, strict=True))

    def scale_slices(self, where: Sequence[slice]) -> tuple[slice, ...]:
        """Return the slices of the scales of a slice of a weight.

        >>> Blocks(128, 128).scale_slices((slice(96, 192), slice(256, 384)))
        (slice(0, 2, None), slice(2, 3, None))
        """
        return tuple(
            slice(part.start // block, -(-part.stop // block)) for part, block in zip(where, self, strict=True)
        )


def blocks_of(values: Mapping[str, Any], where: str) -> Blocks | None:
    """Return the blocks of a model's weights; None if they are not quantised.

    Args:
        values: of config.json.
        where: how messages name it.

    Raises:
        ValueError: weights that are quantised in another way.
    """
    found = values.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} needs quantization_config as an object of names and values, got {found!r}")
    for name, value in found.items():
        if name not in _LISTS and value not in _KNOWN.get(name, ()):
            raise ValueError(
                f"{where} has quantization_config with {name}={value!r}, and of quantised weights those in fp8 (e4m3) "
                "with a scale for each block are known; convert the folder to bfloat16 first"
            )
    size = found.get("weight_block_size")
    is_size = isinstance(size, list) and len(size) == 2 and all(type(part) is int and part > 0 for part in size)
    if found.get("quant_method") is None or not isinstance(size, list) or not is_size:
        raise ValueError(
            f"{where} needs a quantization_config with quant_method='fp8' and weight_block_size as two whole numbers "
            f"above 0, got {dict(found)}"
        )
    return Blocks(*size)


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
