"""Bucketed reduction: equal to one process, launched during the backward, once per step, and hard to misuse."""

import pytest
import torch
from models import Tiny, assert_close, grads, launch, make_batch, reference_grads, row_loss
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.buckets import all_reduce_async, assign_buckets
from dualpipe_lab.dp.ddp import GradientReducer
from dualpipe_lab.sharding import shard_slice


def step(model, reducer, tokens, targets, num_microbatches, num_tokens):
    """Backward of each microbatch of this rank's rows; rows of a microbatch may be none."""
    for m in range(num_microbatches):
        rows = shard_slice(len(tokens), num_microbatches, m)
        loss = row_loss(model, tokens[rows], targets[rows], num_tokens)
        if loss.requires_grad:
            loss.backward()
    reducer.finish()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_equal_one_process_for_any_buckets_and_microbatches(num_ranks):
    tokens, targets = make_batch(rows=8)
    num_tokens = int((targets != -100).sum())

    def fn(rank, world_size):
        rows, found = shard_slice(len(tokens), world_size, rank), []
        for num_microbatches in (1, 3):
            for bucket_bytes in (1, 300, 2**20):
                model = Tiny()
                reducer = GradientReducer(model.parameters(), num_backwards=num_microbatches, bucket_bytes=bucket_bytes)
                for _ in range(2):  # the second step starts from the zeros of the first
                    reducer.zero()
                    step(model, reducer, tokens[rows], targets[rows], num_microbatches, num_tokens)
                found.append((grads(model), len(reducer.buckets), model.frozen.grad))
        return found

    expected = reference_grads(tokens, targets)
    out = launch(fn, num_ranks)
    for found in out:
        assert [number for _, number, _ in found] == [5, 3, 1] * 2
        for ours, _, frozen in found:
            assert_close(ours, expected)
            assert frozen is None


def test_two_ranks_equal_accumulation_bitwise():
    """The sum of two numbers has one order only."""
    x, w = torch.randn(2, 3, 5), torch.randn(7, 5)

    def fn(rank, world_size):
        layer = nn.Linear(5, 7, bias=False)
        layer.weight.data.copy_(w)
        reducer = GradientReducer(layer.parameters())
        layer(x[rank]).square().sum().backward()
        reducer.finish()
        return layer.weight.grad.clone()

    layer = nn.Linear(5, 7, bias=False)
    layer.weight.data.copy_(w)
    for part in x:
        layer(part).square().sum().backward()
    assert all(torch.equal(ours, layer.weight.grad) for ours in launch(fn, 2))


def test_sums_start_while_the_backward_runs_and_once_per_step():
    num_layers, num_microbatches = 4, 3

    def fn(rank, world_size):
        started = []

        def spy(flat, group):
            started.append([bool(flat.any()) for flat in reversed(reducer.flats)])
            return all_reduce_async(flat, group)

        model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(num_layers)])
        reducer = GradientReducer(model.parameters(), num_backwards=num_microbatches, bucket_bytes=1, reduce_async=spy)
        addresses = [layer.weight.grad.data_ptr() for layer in model]
        for _ in range(num_microbatches - 1):
            model(torch.ones(1, 4)).sum().backward()
        assert not started
        for flat in reducer.flats:
            flat.zero_()  # shows which gradients exist when a bucket starts
        model(torch.ones(1, 4)).sum().backward()
        reducer.finish()
        return started, addresses == [layer.weight.grad.data_ptr() for layer in model]

    out = launch(fn, 2)
    for started, is_view in out:
        assert started == [
            [layer >= num_layers - 1 - index for layer in range(num_layers)] for index in range(num_layers)
        ]
        assert is_view
    # one all-reduce per bucket and step, of 16 floats
    assert [out.ledger.count("all_reduce", rank) for rank in range(2)] == [num_layers] * 2
    assert out.ledger.sent("all_reduce", 0) == num_layers * 16 * 4


def test_a_parameter_used_on_one_rank_only_gives_the_same_sum_everywhere():
    def fn(rank, world_size):
        used, rare, last = (nn.Parameter(torch.ones(3)) for _ in range(3))
        reducer = GradientReducer([used, rare, last], bucket_bytes=12)
        for _ in range(2):
            reducer.zero()
            loss = (used * last).sum() * (rank + 1)
            (loss + rare.sum() if rank == 1 else loss).backward()
            reducer.finish()
        return used.grad.clone(), rare.grad.clone(), last.grad.clone()

    for used, rare, last in launch(fn, 3):
        assert used.tolist() == last.tolist() == [6.0] * 3
        assert rare.tolist() == [1.0] * 3


def test_gradients_that_an_optimizer_dropped_come_back_into_the_bucket():
    def fn(rank, world_size):
        layer = nn.Linear(3, 2).double()
        reducer, seen = GradientReducer(layer.parameters()), []
        for scale in (1.0, 2.0):
            layer.zero_grad(set_to_none=True)
            layer(torch.ones(1, 3, dtype=torch.float64) * scale).sum().backward()
            reducer.finish()
            seen.append(
                (
                    layer.weight.grad.clone(),
                    layer.weight.grad.untyped_storage().data_ptr() == reducer.flats[0].data_ptr(),
                )
            )
        reducer.close()
        layer.zero_grad()
        layer(torch.ones(1, 3, dtype=torch.float64)).sum().backward()  # nobody listens any more
        return seen, layer.weight.grad.clone()

    for seen, after in launch(fn, 2):
        assert [float(grad[0, 0]) for grad, _ in seen] == [2.0, 4.0]
        assert all(is_view for _, is_view in seen)
        assert float(after[0, 0]) == 1.0


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


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        ("twice", "backward number 2 of the step, and num_backwards=1"),
        ("no zero", r"adds to gradients that are summed already; call zero_grad\(\) of the optimizer, or zero\(\)"),
        ("frozen", "no parameter needs a gradient"),
        ("count", "at least 1 backward, got num_backwards=0"),
        ("bytes", "at least 1 byte, got bucket_bytes=0"),
    ],
)
def test_misuse_is_named(misuse, message):
    def fn(rank, world_size):
        layer = nn.Linear(2, 2)
        if misuse == "frozen":
            layer.requires_grad_(False)
        reducer = GradientReducer(
            layer.parameters(), num_backwards=int(misuse != "count"), bucket_bytes=int(misuse != "bytes")
        )
        layer(torch.ones(1, 2)).sum().backward()
        if misuse == "no zero":
            reducer.finish()
        layer(torch.ones(1, 2)).sum().backward()

    with pytest.raises(lab.RankError, match=message):
        launch(fn, 1)


def test_buckets_hold_one_type_each_and_go_backwards():
    a, b, c, d = (nn.Parameter(torch.zeros(size)) for size in (4, 1, 2, 3))
    e = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    assert [[p.numel() for p in bucket] for bucket in assign_buckets([a, b, c, d], bucket_bytes=20)] == [[3, 2], [1, 4]]
    assert assign_buckets([a, e, b]) == [[b], [e], [a]]
    assert assign_buckets([a, b], bucket_bytes=1) == [[b], [a]]
    assert assign_buckets([]) == []
