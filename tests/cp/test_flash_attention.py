"""Attention in tiles: equal to the oracle and to torch, for any tiles, heads and masks, with what it saves counted."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cp_runs import ORACLE, assert_close, attention_bounds, draw, floats
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import kept

from dualpipe_lab.cp.closed_forms import AttentionSizes
from dualpipe_lab.cp.closed_forms import saved_bytes as saved_bytes_form
from dualpipe_lab.cp.flash_attention import FlashTiles, flash_attention
from dualpipe_lab.dp.measure import storage_bytes

MASKS = {"none": None, "top_left": "top_left", "bottom_right": "bottom_right"}


def gradients(function, q, k, v, grad):
    """Output and gradients of q, k, v, from fresh leaves."""
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def reference(q, k, v, causal, scale=None):
    """torch's attention, with the mask written out."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        mask = mask.tril(k.shape[2] - q.shape[2] if causal == "bottom_right" else 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: case["name"])
def test_every_number_of_the_oracle_for_every_tile(case):
    q, k, v, grad = (floats(case[name])[None] for name in ("Q", "K", "V", "dO"))
    expected = {name: floats(case["expected"][name])[None] for name in ("O", "LSE", "D", "dQ", "dK", "dV")}
    offset = {"none": None, "top_left": 0, "bottom_right": k.shape[2] - q.shape[2]}[case["mask"]]
    for sizes in ((1, 1), (2, 3), (3, 2), (128, 512)):
        tiles = FlashTiles(*sizes)
        out, lse = tiles.forward(q, k, v, offset, 0.5)
        grads = tiles.backward(grad, q, k, v, out, lse, offset, 0.5)
        for name, found in zip(("O", "LSE", "D"), (out, lse, (grad * out).sum(-1)), strict=True):
            assert_close(found, expected[name], case=f"{sizes} {name}")
        for name, found in zip(("dQ", "dK", "dV"), grads, strict=True):
            assert_close(found, expected[name], case=f"{sizes} {name}")


sizes = st.integers(1, 9)


@given(sizes, sizes, sizes, sizes, st.sampled_from(list(MASKS)), st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]))
@settings(max_examples=40)
def test_equals_torch_for_any_sizes_tiles_masks_and_groups(num_queries, num_keys, rows, columns, mask, heads):
    q, grad = (draw(2, heads[0], num_queries, 4, seed=seed) for seed in (0, 3))
    k, v = (draw(2, heads[1], num_keys, 4, seed=seed) for seed in (1, 2))
    tiles = FlashTiles(rows, columns)
    scale = 0.3 if rows > columns else None
    ours = gradients(lambda *qkv: flash_attention(*qkv, causal=MASKS[mask], scale=scale, tiles=tiles), q, k, v, grad)
    theirs = gradients(lambda *qkv: reference(*qkv, MASKS[mask], scale), q, k, v, grad)
    for name, mine, other in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert_close(mine, other.nan_to_num(0), case=name)


def test_inputs_may_be_views_of_any_strides():
    wide = draw(3, 5, 2, 3, 4)  # positions, batch, heads ...
    q, k, v = (wide[..., i, :].permute(1, 2, 0, 3) for i in range(3))
    grad = draw(5, 4, 3, 2).permute(0, 3, 2, 1)
    ours = gradients(lambda *qkv: flash_attention(*qkv, tiles=FlashTiles(2, 2)), q, k, v, grad)
    out, lse = FlashTiles(2, 2).forward(q, k, v, None, 0.5)
    direct = [out, *FlashTiles(2, 2).backward(grad, q, k, v, out, lse, None, 0.5)]
    for found in (ours, direct):
        for mine, other in zip(found, gradients(lambda *qkv: reference(*qkv, None), q, k, v, grad), strict=True):
            assert_close(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_no_further_off_than_rounding_explains(dtype):
    wide = [draw(2, 4, 100, 16, seed=seed).to(dtype).double() for seed in range(4)]
    exact = gradients(lambda *qkv: reference(*qkv, "top_left"), *wide)
    narrow = [tensor.to(dtype) for tensor in wide]
    ours = gradients(lambda *qkv: flash_attention(*qkv, causal="top_left", tiles=FlashTiles(32, 16)), *narrow)
    theirs = gradients(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), *narrow)
    bounds = attention_bounds(*narrow, True, dtype)
    for mine, other, right, bound in zip(ours, theirs, exact, bounds, strict=True):
        assert mine.dtype == dtype
        assert ((mine - right).abs() <= bound).all()
        assert ((other - right).abs() <= bound).all()  # torch's own kernel keeps the bound too


def saved_bytes(function, length, heads=4, kv_heads=2, size=8):
    """Bytes that a forward keeps for its backward, each storage once."""
    q, k, v = (draw(1, number, length, size).float().requires_grad_() for number in (heads, kv_heads, kv_heads))
    return storage_bytes(tensor.detach() for tensor in kept(lambda: function(q, k, v)))


def naive(q, k, v):
    """The formula itself: scores and weights of all pairs."""
    k, v = (
        tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) if k.shape != q.shape else tensor for tensor in (k, v)
    )
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def test_saved_bytes_are_linear_in_the_length_and_naively_quadratic():
    lengths = (64, 128, 256)
    tiled = [saved_bytes(flash_attention, length) for length in lengths]
    # Q and O of 4 heads, K and V of 2, of 8 numbers each; and one number per query and head
    assert tiled == [4 * length * (8 * (4 + 4 + 2 + 2) + 4) for length in lengths]
    first, second, third = (saved_bytes(naive, length) for length in lengths)
    assert (third - 2 * second) == 4 * (second - 2 * first) > 0  # a s^2 + b s
    sizes = AttentionSizes(1, 4, 4, 8, element_bytes=4, state_bytes=4)
    assert [saved_bytes_form(64, sizes, is_naive) for is_naive in (False, True)] == [
        saved_bytes(function, 64, kv_heads=4) for function in (flash_attention, naive)
    ]


def test_what_nobody_sees_is_not_computed():
    tiles = FlashTiles(2, 2)
    visited = [len(list(tiles.key_tiles(slice(first, first + 2), 8, 0))) for first in range(0, 8, 2)]
    masked = [sum(hidden is not None for _, hidden in tiles.key_tiles(slice(f, f + 2), 8, 0)) for f in range(0, 8, 2)]
    assert (visited, masked) == ([1, 2, 3, 4], [1, 1, 1, 1])
    pairs = sum(
        int((~hidden).sum()) if hidden is not None else 2 * (keys.stop - keys.start)
        for first, offset in itertools.product(range(0, 8, 2), (-1, 2))
        for keys, hidden in tiles.key_tiles(slice(first, first + 2), 7, offset)
    )
    expected = sum(max(0, min(7, query + 1 + offset)) for query in range(8) for offset in (-1, 2))
    assert pairs == expected


@pytest.mark.parametrize("shape", [(0, 2, 4, 3), (1, 0, 4, 3), (1, 2, 0, 3)])
def test_without_a_batch_heads_or_positions_the_result_is_empty_and_without_keys_zero(shape):
    q, k = torch.zeros(shape, requires_grad=True), torch.zeros(shape[0], 2, *shape[2:], requires_grad=True)
    out = flash_attention(q, k, k, causal="top_left")
    out.sum().backward()
    assert out.shape == q.grad.shape == shape
    assert not k.grad.any()
    nobody, lse = FlashTiles().forward(draw(1, 1, 5, 4), *[torch.zeros(1, 1, 0, 4)] * 2, None, 1.0)
    assert not nobody.any()
    assert lse.eq(-torch.inf).all()


def attend(q, k, **options):
    return flash_attention(*(torch.zeros(shape) for shape in (q, k, k)), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attend((1, 3, 4, 2), (1, 2, 4, 2)), "3 do not divide among 2"),
        (lambda: attend((2, 2, 4, 2), (1, 2, 4, 2)), "the same batch and head size"),
        (lambda: attend((1, 2, 4, 3), (1, 2, 4, 2)), "the same batch and head size"),
        (lambda: attend((2, 4, 2), (1, 2, 4, 2)), "takes q"),
        (lambda: attend((1, 2, 4, 2), (1, 0, 4, 2)), "2 do not divide among 0"),
        (lambda: attend((1, 1, 2, 2), (1, 1, 2, 2), causal=True), "is None, top_left or bottom_right, got True"),
        (lambda: FlashTiles(0, 4), "at least 1 query and 1 key, got 0 x 4"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
