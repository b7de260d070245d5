"""Bytes that context parallelism sends and saves: exact numbers, for every rank and any length.

Chapter: book/cp/ring-attention.  In: a layout, heads, bytes per number.  Out: bytes.
  block           2 * batch * kv_heads * head_size * bytes, for each of its positions
  ring forward    the blocks of all ranks but the next one           (c - 1) / c * S_kv for equal blocks
  ring backward   the same, and the gradients of every block once    (c - 1) / c * S_kv + S_dkv
  all-gather      as the ring forward; backward: the gradients of all other ranks, (c - 1) / c * S_dkv
  latents         as the ring, with (r_kv + d_position) * batch numbers for each position
  unfolding       2 * batch * r_kv * a (d_content + d_value) FLOPs per position attended to; 3 times that backward
  saved           tiled (2 a + 2 a_kv) d + a numbers per position    naive: a s^2 more, for the weights
Messages are counted without headers.  A single rank sends nothing.
"""

from typing import Literal, NamedTuple, TypeAlias

from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.launch.record import traffic
from dualpipe_lab.tp.latent_sizes import LatentSizes

Form: TypeAlias = Literal["ring", "all-gather"]
FORMS: tuple[Form, ...] = ("ring", "all-gather")


class AttentionSizes(NamedTuple):
    """The sizes of one attention layer: batch, query heads, KV heads, numbers per head, bytes per number."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    element_bytes: int
    state_bytes: int  # of sums: gradients that travel, LSE; 4 for 16-bit numbers

    @property
    def kv_position(self) -> int:
        """Bytes of the keys and values of one position."""
        return 2 * self.batch * self.num_kv_heads * self.head_size * self.element_bytes

    @property
    def dkv_position(self) -> int:
        """Bytes of the gradients of the keys and values of one position."""
        return 2 * self.batch * self.num_kv_heads * self.head_size * self.state_bytes


class PassBytes(NamedTuple):
    """Bytes of a forward pass and of a backward pass."""

    forward: int
    backward: int


class PassFlops(NamedTuple):
    """FLOPs of a forward pass and of a backward pass."""

    forward: int
    backward: int


def sent_bytes(form: Form, layout: SequenceLayout, rank: int, sizes: AttentionSizes) -> PassBytes:
    """Return the bytes that a rank sends in the forward and backward of `ring_attention` or `all_gather_attention`.

    >>> from dualpipe_lab.cp.layouts import make_layout
    >>> sent_bytes("ring", make_layout("zigzag", 16, 4), 0, AttentionSizes(1, 4, 2, 8, 4, 4))
    PassBytes(forward=1536, backward=3584)

    Raises:
        ValueError: an unknown form.
    """
    if form not in FORMS:
        raise ValueError(f"attention across ranks is one of {', '.join(FORMS)}, got {form!r}")
    if layout.num_ranks == 1:
        return PassBytes(0, 0)
    held = [layout.size(number) for number in range(layout.num_ranks)]
    gathered = traffic.all_gather([size * sizes.kv_position for size in held], rank).sent
    if form == "ring":
        return PassBytes(gathered, gathered + layout.length * sizes.dkv_position)
    return PassBytes(gathered, traffic.reduce_scatter([size * sizes.dkv_position for size in held], rank).sent)


def latent_sent_bytes(
    sizes: LatentSizes, layout: SequenceLayout, rank: int, batch: int, element_bytes: int, state_bytes: int
) -> PassBytes:
    """Return the bytes that a rank sends in the forward and backward of a `LatentRing`.

    `state_bytes`: of a number of a gradient that travels, as in `AttentionSizes`.

    >>> from dualpipe_lab.cp.layouts import make_layout
    >>> latent_sent_bytes(LatentSizes(), make_layout("zigzag", 4096, 4), 0, 1, 2, 4)
    PassBytes(forward=3538944, backward=12976128)
    """
    if layout.num_ranks == 1:
        return PassBytes(0, 0)
    position = batch * sizes.cached
    held = [layout.size(number) * position * element_bytes for number in range(layout.num_ranks)]
    gathered = traffic.all_gather(held, rank).sent
    return PassBytes(gathered, gathered + layout.length * position * state_bytes)


def unfolding_flops(sizes: LatentSizes, num_heads: int, layout: SequenceLayout, rank: int, batch: int = 1) -> PassFlops:
    """Return the FLOPs with which a rank unfolds latents in a `LatentRing`, for so many heads of its own.

    The backward unfolds again, then multiplies twice, for the gradients of latents and weight.  With layouts of 1 rank
    the forward is that of attention without a ring, whose backward takes twice the forward.

    >>> from dualpipe_lab.cp.layouts import make_layout
    >>> ranks = [unfolding_flops(LatentSizes(), 128, make_layout("zigzag", 4096, 4), rank).forward for rank in range(4)]
    >>> alone = unfolding_flops(LatentSizes(), 128, make_layout("zigzag", 1024, 1), 0).forward
    >>> [flops / alone for flops in ranks]
    [4.0, 3.5, 3.0, 2.5]
    """
    masks = [layout.mask(rank, source, causal=True) for source in range(layout.num_ranks)]
    seen = sum(mask.keys.stop - mask.keys.start for mask in masks if mask is not None)
    flops = 2 * batch * seen * sizes.kv_rank * num_heads * (sizes.content + sizes.value)
    return PassFlops(flops, 3 * flops)


def saved_bytes(length: int, sizes: AttentionSizes, is_naive: bool = False) -> int:
    """Return the bytes that attention saves for its backward, for `length` positions of this rank.

    >>> [saved_bytes(length, AttentionSizes(1, 2, 2, 8, 4, 4)) for length in (8, 16)]
    [2112, 4224]
    """
    heads = 2 * sizes.num_heads + 2 * sizes.num_kv_heads  # Q, O; K, V
    numbers = length * heads * sizes.head_size * sizes.element_bytes
    if is_naive:  # the weights; O is not needed
        return sizes.batch * (
            numbers
            - length * sizes.num_heads * sizes.head_size * sizes.element_bytes
            + sizes.num_heads * length**2 * sizes.element_bytes
        )
    return sizes.batch * (numbers + length * sizes.num_heads * sizes.state_bytes)
