"""Latents on a ring: output, raw gradients, bytes and FLOPs beside one process and the closed forms; refusals."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from attention_runs import join
from cp_runs import assert_close, draw
from runs import RANKS, assert_refused, kept, launch, sent
from torch.utils.flop_counter import FlopCounterMode

from dualpipe_lab.cp.closed_forms import latent_sent_bytes, unfolding_flops
from dualpipe_lab.cp.latent_ring import LatentRing
from dualpipe_lab.cp.layouts import LAYOUTS, make_layout
from dualpipe_lab.cp.ring_attention import ring_attention
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.tp.latent_sizes import LatentSizes

BATCH, HEADS = 2, 3
SIZES = {
    "narrow values": LatentSizes(query_rank=None, kv_rank=5, content=4, position=2, value=3),
    "wide values": LatentSizes(query_rank=None, kv_rank=4, content=2, position=2, value=7),
}
LENGTHS = {1: (5,), 2: (12, 7, 1), 3: (12, 7), 4: (16, 7, 3)}
NAMES = ("out", "dq", "dc", "dw")


def inputs(length, sizes, dtype=torch.float64):
    """q, latents and the gradient of the output of a whole sequence; the weight that unfolds."""
    shapes = (
        (BATCH, HEADS, length, sizes.key),
        (BATCH, length, sizes.cached),
        (BATCH, HEADS, length, sizes.value),
        (HEADS * (sizes.content + sizes.value), sizes.kv_rank),
    )
    return [draw(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]


def unfolded(c, w, sizes):
    """Keys and values, position by position and head by head."""
    heads = (c[..., : sizes.kv_rank] @ w.T).view(*c.shape[:2], HEADS, -1).permute(0, 2, 1, 3)
    shared = torch.stack([c[..., sizes.kv_rank :]] * HEADS, 1)
    return torch.cat((heads[..., : sizes.content], shared), -1), heads[..., sizes.content :]


def reference(length, sizes, dtype=torch.float64):
    """Output and gradients of torch's attention on one process, by autograd, in float64."""
    q, c, grad, w = (x.double() for x in inputs(length, sizes, dtype))
    leaves = [x.requires_grad_() for x in (q, c, w)]
    out = F.scaled_dot_product_attention(q, *unfolded(c, w, sizes), is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def cases(num_ranks):
    found = []
    for name, length, kind in itertools.product(LAYOUTS, LENGTHS[num_ranks], SIZES):
        if name != "zigzag" or length % (2 * num_ranks) == 0:
            found.append((make_layout(name, length, num_ranks), SIZES[kind]))
    return found


def measured(action):
    """Its result, the bytes that this rank sends in it, and the FLOPs of its products but those of scores."""
    with FlopCounterMode(display=False) as counter:
        found = sent(action)
    return *found, counter.get_flop_counts().get("Global", {}).get(torch.ops.aten.mm, 0)  # scores are batched: bmm


def part(layout, sizes, rank, dtype=torch.float64):
    """Output and gradients of a rank, the bytes that it sends, and FLOPs of its products with the weight."""
    q, c, grad, w = inputs(layout.length, sizes, dtype)
    q, c, grad = (
        shard_sequence(q, layout, rank, 2),
        shard_sequence(c, layout, rank, 1),
        shard_sequence(grad, layout, rank, 2),
    )
    leaves = [x.clone().requires_grad_() for x in (q, c, w)]
    out, *forward = measured(lambda: LatentRing(layout).of_latents(*leaves, sizes))
    grads, *backward = measured(lambda: torch.autograd.grad(out, leaves, grad))
    return [out.detach(), *grads], *zip(forward, backward, strict=True)


def whole(parts, layout):
    """All positions of output, dq and dc from the ranks' shards; the sum of their dw."""
    *shards, dw = zip(*parts, strict=True)
    return [*(join(each, layout, dim) for dim, each in zip((2, 2, 1), shards, strict=True)), sum(dw)]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_output_gradients_bytes_and_flops_equal_one_process_and_the_closed_forms(num_ranks):
    chosen = cases(num_ranks)

    def fn(rank, world_size):
        return [part(*case, rank) for case in chosen]

    for (layout, sizes), results in zip(chosen, zip(*launch(fn, num_ranks), strict=True), strict=True):
        parts, moved, flops = zip(*results, strict=True)
        case = f"{layout} {sizes}"
        for name, mine, other in zip(NAMES, whole(parts, layout), reference(layout.length, sizes), strict=True):
            assert_close(mine, other, case=f"{case} {name}")
        for rank in range(num_ranks):
            assert moved[rank] == latent_sent_bytes(sizes, layout, rank, BATCH, 8, 8), case
            assert flops[rank] == unfolding_flops(sizes, HEADS, layout, rank, BATCH), case


def test_no_keys_or_values_are_kept_for_the_backward():
    """Queries, output, LSE and the rank's latents, whatever the number of ranks; `ring_attention` keeps K and V too."""
    sizes, layout = SIZES["narrow values"], make_layout("contiguous", 12, 2)

    def fn(rank, world_size):
        q, c, _, w = inputs(6, sizes)
        k, v = unfolded(c, w, sizes)
        v = F.pad(v, (0, sizes.key - sizes.value))
        latents = [x.requires_grad_() for x in (q, c, w)]
        full = [x.detach().requires_grad_() for x in (q, k, v)]
        return (
            kept_numbers(lambda: LatentRing(layout).of_latents(*latents, sizes)),
            kept_numbers(lambda: ring_attention(*full, layout)),
        )

    tokens, heads = BATCH * 6, HEADS
    weight = heads * (sizes.content + sizes.value) * sizes.kv_rank
    latents = tokens * (heads * (sizes.key + sizes.value + 1) + sizes.cached) + weight
    for found in launch(fn, 2):
        assert found == (latents, tokens * heads * (4 * sizes.key + 1))


def kept_numbers(action):
    return sum(tensor.numel() for tensor in kept(action))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_summed_in_fp32(dtype):
    """Rounding of dtype alone, and gradients travel in 4 bytes."""
    sizes, layout = SIZES["narrow values"], make_layout("zigzag", 32, 2)

    def fn(rank, world_size):
        return part(layout, sizes, rank, dtype)

    parts, moved, _ = zip(*launch(fn, 2), strict=True)
    for name, mine, right in zip(NAMES, whole(parts, layout), reference(32, sizes, dtype), strict=True):
        assert mine.dtype == dtype
        assert_close(mine, right, 16 * torch.finfo(dtype).eps, f"{name} {dtype}")
    assert list(moved) == [latent_sent_bytes(sizes, layout, rank, BATCH, dtype.itemsize, 4) for rank in range(2)]


def test_auto_sends_what_is_shorter():
    layout = make_layout("striped", 7, 1)
    assert LatentRing(layout).takes_latents(SIZES["narrow values"], 1)  # 7 numbers; keys and values of one head 12
    assert not LatentRing(layout).takes_latents(LatentSizes(kv_rank=10, content=4, position=2, value=3), 1)
    taken = {
        sends: LatentRing(layout, sends=sends).takes_latents(LatentSizes(), 1) for sends in ("auto", "latents", "keys")
    }
    assert taken == {"auto": False, "latents": True, "keys": False}
    assert LatentRing(layout).takes_latents(LatentSizes(), 2)
    with pytest.raises(ValueError, match="one of auto, latents, keys, got 'values'"):
        LatentRing(layout, sends="values")


REFUSED = [
    ({0: (2, 3, 12, 5)}, r"queries are \(batch, heads, positions, 6\)"),
    ({1: (2, 12, 6)}, r"latents \(batch, positions, 7\)"),
    ({1: (1, 12, 7)}, r"got \[\(2, 3, 12, 6\), \(1, 12, 7\)"),
    ({2: (20, 5)}, "take 21 rows of the weight that unfolds, got 20; give it the heads"),
    ({2: (21, 4)}, r"\(rows, 5\)"),
    ({0: (2, 3, 11, 6)}, "holds 12 positions"),
    ({1: (2, 13, 7)}, "holds 12 positions"),
]


def test_what_does_not_fit_is_refused():
    def attend(change):
        shapes, layout = {0: (2, 3, 12, 6), 1: (2, 12, 7), 2: (21, 5)} | change, make_layout("contiguous", 12, 1)
        LatentRing(layout).of_latents(*(torch.zeros(shapes[i]) for i in range(3)), SIZES["narrow values"])

    assert_refused(1, [(lambda change=change: attend(change), words) for change, words in REFUSED])
