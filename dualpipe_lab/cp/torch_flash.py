"""`TorchFlash`: torch's flash attention for CPUs as the kernel of a ring, where speed matters more than reading.

Chapter: book/cp/ring-attention.  In: one block of queries and one of keys.  Out: as `FlashTiles`.
It supports full blocks and triangles, and a ring needs no other mask.  Its LSE of a query that sees no key is 0 instead
of -inf.  That would spoil a merge, but no layout has such a query.
"""

from torch import Tensor

from dualpipe_lab._private import flash_attention_for_cpu, flash_attention_for_cpu_backward
from dualpipe_lab.cp.flash_attention import Grads


class TorchFlash:
    """A `Kernel` that calls the two operations behind `scaled_dot_product_attention` on a CPU.

    Raises:
        ValueError: an offset other than 0 or None.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return `out_BHSD` and `lse_BHS`; arguments as in `Kernel`."""
        k, v = (_repeated(tensor, q) for tensor in (k, v))
        operation = flash_attention_for_cpu()
        out, lse = operation(q, k, v, 0.0, _is_triangle(offset), scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offset: int | None, scale: float
    ) -> Grads:
        """Return the gradients of q, k, v; arguments as in `Kernel`."""
        heads = k.shape[1]
        k, v = (_repeated(tensor, q) for tensor in (k, v))
        operation = flash_attention_for_cpu_backward()
        lse = lse.contiguous()  # it reads a strided one as if it were dense
        dq, dk, dv = operation(grad, q, k, v, out.to(q.dtype), lse, 0.0, _is_triangle(offset), scale=scale)
        return dq, _summed(dk, heads), _summed(dv, heads)


def _is_triangle(offset: int | None) -> bool:
    if offset not in (None, 0):
        raise ValueError(f"torch's kernel sees a full block or a triangle, got offset={offset}; use FlashTiles")
    return offset == 0


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Return `x` with each KV head repeated for each of its query heads, side by side."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
