"""What the stages hold and send, measured as live tensors and in the ledger, against the closed forms."""

import gc

import pytest
import torch
from models import launch
from torch import nn

from dualpipe_lab.dp.closed_forms import (
    BF16,
    BF16_FP32_GRADS,
    FP32,
    ZERO_STAGES,
    bytes_per_parameter,
    sent_bytes,
)
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.measure import live_bytes, storage_bytes
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.launch.context import rank_context

CLASSES = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
PRECISIONS = {
    "bf16": (BF16, torch.bfloat16, {"master": True}),
    "fp32 gradients": (BF16_FP32_GRADS, torch.bfloat16, {"master": True, "grad_dtype": torch.float32}),
    "fp32": (FP32, torch.float32, {}),
}


def make(width, dtype, num_layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, 7) if at % 2 else nn.Linear(7, width) for at in range(num_layers)]).to(
        dtype
    )


def build(stage, model, options, **more):
    return CLASSES[stage](model, **options, **more)


def step(optimizer, num_microbatches, dtype):
    optimizer.zero_grad()
    for _ in range(num_microbatches):
        optimizer.module(torch.ones(2, 7, dtype=dtype)).square().mean().backward()
    return optimizer.step()


def settled(measure, expected):
    """Measure until GLOO's threads have let go of the last collective's tensors, or for a few seconds."""
    for _ in range(30):
        if measure() == expected:
            break
    return measure()


@pytest.mark.parametrize("width", [5, 24])  # 5 x 7 weights: padding for 2, 3 and 4 ranks; 24 x 7: none for the weights
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_live_tensors_equal_the_closed_forms(num_ranks, width):
    """Those of an optimizer that was dropped are gone when the next one is measured."""

    def fn(rank, world_size):
        gc.freeze()  # what was there before need not be looked through each time
        found, before = {}, live_bytes()
        for stage in ZERO_STAGES:
            for name, (precision, dtype, options) in PRECISIONS.items():
                optimizer = build(stage, make(width, dtype), {"num_backwards": 2, **options})
                step(optimizer, 2, dtype)
                padded = optimizer.padded_numel
                # ZeRO-3 shows absent weights as NaN: one number for each of its three units
                absent = 3 * dtype.itemsize * (stage == "zero3")
                expected = bytes_per_parameter(stage, num_ranks, precision) * padded + absent
                found[stage, name] = settled(lambda: live_bytes() - before, expected), expected, padded
                del optimizer
        assert settled(lambda: live_bytes() - before, 0) == 0
        return found

    for found in launch(fn, num_ranks):
        for case, (measured, expected, padded) in found.items():
            assert measured == expected, case
            numel = 3 * 7 * width + 7 + 2 * width  # a layer of 7 outputs, two of `width`
            assert numel <= padded < numel + 3 * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_sent_bytes_equal_the_closed_forms(num_ranks, num_microbatches):
    collectives = ("all_reduce", "reduce_scatter_single", "all_gather_single")
    cases = [(stage, name, True) for stage in ZERO_STAGES for name in PRECISIONS] + [("zero3", "bf16", False)]

    def sent():
        entries = rank_context().ledger.entries
        return sum(entries[kind].sent for kind in collectives if kind in entries)

    def fn(rank, world_size):
        found = []
        for stage, name, reshard in cases:
            precision, dtype, options = PRECISIONS[name]
            more = {"reshard_after_forward": reshard} if stage == "zero3" else {}
            optimizer, before = (
                build(stage, make(8, dtype), {"num_backwards": num_microbatches, **options}, **more),
                sent(),
            )
            step(optimizer, num_microbatches, dtype)
            expected = sent_bytes(stage, num_ranks, optimizer.padded_numel, num_microbatches, precision, reshard)
            found.append((sent() - before, expected, stage, name, reshard))
        return found

    for found in launch(fn, num_ranks):
        for measured, expected, *case in found:
            assert measured == expected > 0, case


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="stages are ddp, zero1, zero2, zero3"):
        bytes_per_parameter("zero4", 2)


def test_storage_counts_once_and_not_when_freed():
    def fn(rank, world_size):  # a fresh process: nobody else's tensors come and go
        x = torch.zeros(10)
        found = [storage_bytes([x, x[:5], x.view(2, 5)])]
        before = live_bytes()
        y = torch.zeros(100)
        y.requires_grad_().sum().backward()
        found.append(live_bytes() - before)
        y.detach().untyped_storage().resize_(0)
        return [*found, live_bytes() - before]

    assert launch(fn, 1) == [[40, 800, 400]]
