"""Query heads that share a key and value head: checked, and laid out so that one product serves all of them.

Chapter: book/cp/flash-attention.  In: `q_BHSD`, `k_BKTD`.  Out: `q_NGSD`, `k_NTD`; N = B K, G = H / K.
Rows of all heads of a group are one matrix: the products need no copies of the keys, and the gradient of a key head
is summed over its query heads by the product itself.
Source: Ainslie et al. 2023 (arXiv 2305.13245).
"""

from torch import Tensor


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what does not fit together.

    Raises:
        ValueError: other than four axes, another batch or size of a head, or query heads that do not divide among the
            key heads.
    """
    shapes = [tuple(tensor.shape) for tensor in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes) or k.shape != v.shape:
        raise ValueError(f"attention takes q (batch, heads, positions, size) and k, v of one shape, got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k need the same batch and head size, got {shapes[0]} and {shapes[1]}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"query heads are shared out among key heads, and {q.shape[1]} do not divide among {k.shape[1]}"
        )


def default_scale(q: Tensor) -> float:
    """One over the root of the size of a head: scores of random vectors then have variance 1."""
    return float(q.shape[-1] ** -0.5)


def grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """`x_NGSD`: query heads in groups; for anything that has the axes of q, or of q without the last."""
    batch, heads, *rest = x.shape
    view: Tensor = x.reshape(batch * num_kv_heads, heads // num_kv_heads, *rest)
    return view


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """The rows of some queries, of all heads of a group under one another: `x_NRD`, R = G rows."""
    part = x[:, :, rows]
    # counted, not -1: without a batch or heads there are no elements from which it could be inferred
    stacked: Tensor = part.reshape(part.shape[0], part.shape[1] * part.shape[2], *part.shape[3:])
    return stacked
