"""The blocks of weights in fp8, each of which has a scale; needs no torch.

Chapter: book/whole/weights.  In: the values of config.json.  Out: rows and columns of a block.
Elsewhere: transformers `FineGrainedFP8Config`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
