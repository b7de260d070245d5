"""What both forms of attention across ranks share: the merge of two results, and the loop over blocks of keys.

Chapter: book/cp/ring-attention.  In: this rank's queries, blocks of keys and values as they come.  Out: O and LSE.
  merge   LSE = ln(e^LSE1 + e^LSE2),   O = O1 + e^(LSE2 - LSE) (O2 - O1)
Source: Dao 2023 (arXiv 2307.08691), section 3.1, for tiles; the same holds for blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualpipe_lab.cp.flash_attention.kernel import Grads, Kernel
from dualpipe_lab.cp.layouts import SequenceLayout, View
from dualpipe_lab.cp.ring import Ring
from dualpipe_lab.cp.softmax import accumulate_in, reference
from dualpipe_lab.cp.step_log import StepLog


@dataclass
class RingLog:
    """The steps of a forward and of a backward."""

    forward: StepLog = field(default_factory=StepLog)
    backward: StepLog = field(default_factory=StepLog)


@dataclass(frozen=True)
class Plan:
    """What stays the same in all steps of one call."""

    ring: Ring
    layout: SequenceLayout
    causal: bool
    scale: float
    kernel: Kernel
    log: RingLog | None = None

    def view(self, source: int) -> View | None:
        """What this rank sees of the block of `source`."""
        return self.layout.view(self.ring.position, source, self.causal)

    def block_shape(self, k: Tensor, source: int) -> tuple[int, ...]:
        """The shape of a block of keys and values, `kv_2BKSD`: another rank's may be longer or shorter."""
        return 2, *k.shape[:2], self.layout.size(source), k.shape[3]


def attend(q: Tensor, blocks: Iterable[tuple[int, Tensor]], plan: Plan) -> tuple[Tensor, Tensor]:
    """Merge the attention to each block; the first is this rank's own.

    Args:
        q: this rank's queries `q_BHSD`.
        blocks: the number of the rank that a block is of, and its keys and values `kv_2BKSD`.
        plan: the call.
    """
    wide = accumulate_in(q.dtype)
    out, lse = torch.empty_like(q, dtype=wide), torch.empty(q.shape[:3], dtype=wide, device=q.device)
    for source, (k, v) in blocks:
        view = plan.view(source)
        if view is None:
            continue
        if source == plan.ring.position:  # every query sees something of its own block
            out, lse = (part.to(wide) for part in _attend_block(q, k, v, view, plan))
        else:
            merge(out[:, :, view.queries], lse[:, :, view.queries], *_attend_block(q, k, v, view, plan))
    return out, lse


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Change `out_BHSD` and `lse_BHS` to those of both sets of keys together.

    >>> out, lse = torch.zeros(1), torch.tensor(float("-inf"))
    >>> merge(out, lse, torch.tensor([5.0]), torch.tensor(1700.0))
    >>> out.item(), lse.item()
    (5.0, 1700.0)
    """
    total = torch.logaddexp(lse, block_lse)
    weight = torch.exp(block_lse - reference(total))  # 0, and not NaN, where neither side has seen a key
    out.lerp_(block_out.to(out.dtype), weight.to(out.dtype)[..., None])
    lse.copy_(total)


def block_gradients(grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, view: View, plan: Plan) -> Grads:
    """What one block contributes to dQ, and what this rank contributes to the block's dK and dV.

    O and LSE are those of all keys, so that P and D are the parts of the whole that they should be.
    """
    rows = slice(None), slice(None), view.queries
    k, v = kv[:, :, :, view.keys]
    return plan.kernel.backward(grad[rows], q[rows], k, v, out[rows], lse[rows], _offset(view), plan.scale)


def add_block(dq: Tensor, dkv: Tensor, view: View | None, found: Grads | None) -> None:
    """Add what `block_gradients` found, if anything, to dQ `dq_BHSD` and to the block's own `dkv_2BKSD`."""
    if view is None or found is None:
        return
    dq[:, :, view.queries] += found[0]
    for total, part in zip(dkv, found[1:], strict=True):
        total[:, :, view.keys] += part


def _attend_block(q: Tensor, k: Tensor, v: Tensor, view: View, plan: Plan) -> tuple[Tensor, Tensor]:
    k, v = k[:, :, view.keys], v[:, :, view.keys]
    return plan.kernel.forward(q[:, :, view.queries], k, v, _offset(view), plan.scale)


def _offset(view: View) -> int | None:
    return 0 if view.is_triangle else None
