"""Recomputation: the stored inputs, the peak, and the best length of a segment.

Chapter: book/pp/gradient-checkpointing.  In: layers, layers per segment.  Out: exact numbers.
  stored           ceil(L / l) inputs of segments
  peak             stored, plus the saved tensors of l layers while one segment runs its backward
  best length      sqrt(L / a) where the saved tensors of a layer are a times its input
Source: Chen et al. 2016 (arXiv 1604.06174), section 3.
"""

from dualpipe_lab.timeline import Time


def recompute_stored(num_layers: int, length: int) -> int:
    """Return the number of segment inputs that are stored between forward and backward.

    >>> recompute_stored(16, 1), recompute_stored(16, 5)
    (16, 4)
    """
    _check(num_layers, length)
    return -(-num_layers // length)


def recompute_peak(num_layers: int, length: int, inside: Time) -> Time:
    """Return the peak in units of a layer's input; `inside`: the saved tensors of one layer, in the same unit.

    >>> recompute_peak(16, 4, inside=9)
    40
    """
    return recompute_stored(num_layers, length) + min(length, num_layers) * inside


def recompute_best_length(num_layers: int, inside: Time) -> int:
    """Return the length with the smallest peak, near sqrt(num_layers / inside); the shorter of equal ones.

    >>> recompute_best_length(64, 1), recompute_best_length(16, 9)
    (8, 1)
    """
    _check(num_layers, 1)
    return min(range(1, num_layers + 1), key=lambda length: recompute_peak(num_layers, length, inside))


def _check(num_layers: int, length: int) -> None:
    if num_layers < 1 or length < 1:
        raise ValueError(f"layers and segment lengths are at least 1, got {num_layers} and {length}")
