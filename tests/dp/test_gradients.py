"""Bucketed reduction: equal to one process for any buckets, into gradients of any type, memory order and owner."""

import pytest
import torch
from models import assert_close, grads, launch, make_batch
from torch import nn
from zero_runs import Rare, reference_grads

from dualpipe_lab.dp.buckets import assign_buckets
from dualpipe_lab.dp.data_parallel import token_loss
from dualpipe_lab.dp.ddp import GradientReducer
from dualpipe_lab.sharding import shard_slice


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_equal_one_process_for_any_buckets_and_microbatches(num_ranks):
    """Rows of a microbatch may be none."""
    tokens, targets = make_batch(rows=8)
    num_tokens = int((targets != -100).sum())

    def fn(rank, world_size):
        rows, found = shard_slice(len(tokens), world_size, rank), []
        for num_microbatches in (1, 3):
            for bucket_bytes in (1, 300, 2**20):
                model = Rare()
                reducer = GradientReducer(model.parameters(), num_backwards=num_microbatches, bucket_bytes=bucket_bytes)
                for _ in range(2):  # the second step starts from the zeros of the first
                    reducer.zero()
                    for m in range(num_microbatches):
                        part = range(len(tokens))[rows][shard_slice(len(tokens[rows]), num_microbatches, m)]
                        if len(part):
                            token_loss(model(tokens[part]), targets[part], num_tokens).backward()
                    reducer.finish()
                found.append((grads(model), len(reducer.buckets), model.blocks[1][0].bias.grad))
        return found

    expected = reference_grads(tokens, targets)
    out = launch(fn, num_ranks)
    for found in out:
        assert [number for _, number, _ in found] == [8, 5, 1] * 2
        for ours, _, frozen in found:
            assert_close(ours, expected)
            assert frozen is None


def test_expanded_and_transposed_gradients_lie_flat():
    def fn(rank, world_size):
        wide, square = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 3))
        reducer = GradientReducer([wide, square])
        wide.grad = torch.ones(1, 1).expand(2, 3)  # as a split backward may leave them
        square.grad = torch.arange(9.0).view(3, 3).t()
        reducer.finish()
        return wide.grad.tolist(), square.grad.tolist()

    for wide, square in launch(fn, 2):
        assert wide == [[2.0] * 3] * 2
        assert square == (2 * torch.arange(9.0).view(3, 3).t()).tolist()


def test_bf16_parameters_can_accumulate_in_fp32():
    """1000 ones sum to 256 in bf16 and to 1000 in fp32."""

    def fn(rank, world_size):
        found = []
        for dtype in (torch.float32, None):
            parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
            reducer = GradientReducer([parameter], num_backwards=500, dtype=dtype)
            for _ in range(500):
                parameter.sum().backward()
            reducer.finish()
            found.append((parameter.grad.dtype, parameter.grad.float().tolist()))
        return found

    for wide, narrow in launch(fn, 2):
        assert wide == (torch.float32, [1000.0] * 3)
        assert narrow == (torch.bfloat16, [512.0] * 3)  # each rank stops at 256


def test_numbers_that_make_no_sense_are_refused():
    """What a step does wrong is in `test_zero.py`, for every stage."""
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="at least 1 backward, got num_backwards=0"):
        GradientReducer(layer.parameters(), num_backwards=0)
    with pytest.raises(ValueError, match="at least 1 byte, got bucket_bytes=0"):
        GradientReducer(layer.parameters(), bucket_bytes=0)


def test_buckets_hold_one_type_each_and_go_backwards():
    a, b, c, d = (nn.Parameter(torch.zeros(size)) for size in (4, 1, 2, 3))
    e = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    assert [[p.numel() for p in bucket] for bucket in assign_buckets([a, b, c, d], bucket_bytes=20)] == [[3, 2], [1, 4]]
    assert assign_buckets([a, e, b]) == [[b], [e], [a]]
    assert assign_buckets([a, b], bucket_bytes=1) == [[b], [a]]
    assert assign_buckets([]) == []
