"""Reduce-scatter by an all-to-all and a sum in the order of the ranks: values, types, one rank."""

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm

COMBINE = {
    "sum": lambda xs: xs.sum(0),
    "avg": lambda xs: xs.sum(0) / len(xs),
    "max": lambda xs: xs.amax(0),
    "min": lambda xs: xs.amin(0),
    "product": lambda xs: xs.prod(0),
}


def integers(num_ranks, numel, dtype):
    """Every product and partial sum of them is exact in bf16, so every order gives the same bits."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-2, 3, (num_ranks, numel), generator=generator).to(dtype)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_operator_and_type_is_exact_on_integers(num_ranks):
    types = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)

    def fn(rank, world_size):
        found = []
        for dtype in types:
            xs = integers(world_size, 6 * world_size, dtype)
            for op in COMBINE:
                if op == "avg" and not dtype.is_floating_point:
                    continue
                expected = COMBINE[op](xs.double()).to(dtype).view(world_size, 6)
                x, own = xs[rank].clone(), torch.empty(6, dtype=dtype)
                comm.reduce_scatter_single(own, x, op)
                found.append((dtype, op, torch.equal(own, expected[rank]), torch.equal(x, xs[rank])))
        return found

    results = lab.launch(fn, num_ranks)
    for found in results:
        assert all(same and untouched for _, _, same, untouched in found), found
    assert results.ledger.sent("reduce_scatter_single") == results.ledger.received("reduce_scatter_single")


def test_the_sum_is_taken_in_the_order_of_the_ranks_and_in_fp32_for_narrow_types():
    """Numbers for which every other order, and every rounding in between, gives other bits."""
    columns = {
        torch.float32: [1.0, 2.0**24, 1.0, -(2.0**24)],  # (1 + 2^24) + 1 - 2^24 = 0, in any pairs 1 or 2
        torch.bfloat16: [256.0, 1.0, 1.0, 0.0],  # bf16 would lose each 1: 256; fp32 keeps them: 258
        torch.float16: [2048.0, 1.0, 1.0, 0.0],
    }
    expected = {torch.float32: 0.0, torch.bfloat16: 258.0, torch.float16: 2050.0}

    def fn(rank, world_size):
        found = {}
        for dtype, column in columns.items():
            own = torch.empty(3, dtype=dtype)
            comm.reduce_scatter_single(own, torch.full((12,), column[rank], dtype=dtype))
            found[dtype] = own.tolist()
        return found

    for found in lab.launch(fn, 4):
        assert found == {dtype: [value] * 3 for dtype, value in expected.items()}


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_the_output_may_be_a_part_of_the_input_and_the_wait_may_come_late_and_out_of_order(clock):
    def fn(rank, world_size):
        group = comm.new_group([2, 0])
        if rank == 1:
            return True
        place = comm.get_rank(group)
        buffers = [torch.arange(8.0) * (place + 1) + at for at in range(3)]
        owns = [buffer.view(2, -1)[place] for buffer in buffers]
        works = [
            comm.reduce_scatter_single(own, buffer, group=group, async_op=True)
            for own, buffer in zip(owns, buffers, strict=True)
        ]
        for work in reversed(works):
            work.wait()
        sums = [3 * torch.arange(8.0) + 2 * at for at in range(3)]
        return all(torch.equal(own, total.view(2, -1)[place]) for own, total in zip(owns, sums, strict=True))

    assert lab.launch(fn, 3, clock=clock) == [True] * 3


def test_a_leaf_that_needs_a_gradient_may_be_filled():
    def fn(rank, world_size):
        own = torch.zeros(2, requires_grad=True)
        comm.reduce_scatter_single(own, torch.ones(4))
        return own.tolist()

    assert lab.launch(fn, 2) == [[2.0, 2.0]] * 2


def test_from_the_call_to_the_wait_it_holds_as_many_bytes_as_its_input():
    """What pages about memory add on GLOO, beside a bucket that travels."""
    from dualpipe_lab.dp.measure import live_tensors, storage_bytes

    def fn(rank, world_size):
        x = torch.ones(4 * 1_000)
        own = x.view(4, -1)[rank]
        before = storage_bytes(live_tensors())
        work = comm.reduce_scatter_single(own, x, async_op=True)
        under_way = storage_bytes(live_tensors()) - before
        work.wait()
        del work
        return under_way

    assert lab.launch(fn, 4) == [4 * 4 * 1_000] * 4
