"""Ring attention: output, raw gradients and bytes against one process and the closed form, for every layout."""

import pytest
import torch
from attention_runs import BATCH, FORMS, SIZE, cases, inputs, reference, run, whole
from cp_runs import assert_close, attention_bounds
from runs import RANKS

from dualpipe_lab.cp.closed_forms import AttentionSizes, sent_bytes
from dualpipe_lab.cp.layouts import make_layout

LENGTHS = {1: (1, 2, 6), 2: (1, 3, 4, 12), 3: (1, 2, 5, 7, 12), 4: (1, 2, 3, 5, 7, 8, 16)}
NAMES = ("out", "dq", "dk", "dv")


@pytest.mark.parametrize("num_ranks", RANKS)
def test_output_gradients_and_bytes_equal_one_process_and_the_closed_form(num_ranks):
    chosen = cases(num_ranks, LENGTHS[num_ranks])
    results = iter(run(num_ranks, chosen))
    for layout, causal, heads, kv_heads in chosen:
        expected = reference(*inputs(layout.length, heads, kv_heads), causal)
        sizes = AttentionSizes(BATCH, heads, kv_heads, SIZE, element_bytes=8, state_bytes=8)
        for form in FORMS:
            parts, sent = zip(*next(results), strict=True)
            case = f"{form} {layout} causal={causal} heads {heads}/{kv_heads}"
            for name, mine, other in zip(NAMES, whole(parts, layout), expected, strict=True):
                assert_close(mine, other, case=f"{case} {name}")
            assert list(sent) == [sent_bytes(form, layout, rank, sizes) for rank in range(num_ranks)], case


def test_other_forms_are_refused():
    sizes = AttentionSizes(2, 4, 2, 8, element_bytes=2, state_bytes=4)
    with pytest.raises(ValueError, match="one of ring, all-gather, got 'star'"):
        sent_bytes("star", make_layout("zigzag", 48, 4), 0, sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_merged_and_summed_in_fp32(dtype):
    """No further off than rounding explains; gradients travel in 4 bytes."""
    chosen = [(make_layout("zigzag", 64, 4), True, 4, 2), (make_layout("striped", 61, 4), True, 4, 2)]
    results = iter(run(4, chosen, dtype))
    for layout, causal, heads, kv_heads in chosen:
        tensors = inputs(layout.length, heads, kv_heads, dtype)
        exact = reference(*(tensor.double() for tensor in tensors), causal)
        bounds = attention_bounds(*tensors, causal, dtype)
        sizes = AttentionSizes(BATCH, heads, kv_heads, SIZE, dtype.itemsize, 4)
        for form in FORMS:
            parts, sent = zip(*next(results), strict=True)
            for name, mine, right, bound in zip(NAMES, whole(parts, layout), exact, bounds, strict=True):
                assert mine.dtype == dtype
                assert ((mine - right).abs() <= bound).all(), (form, layout, name)
            assert list(sent) == [sent_bytes(form, layout, rank, sizes) for rank in range(4)]
