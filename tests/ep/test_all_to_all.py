"""All-to-all: against the oracle and a plain permutation; the way back; bytes; issue and wait in both directions."""

import pytest
import torch
from ep_runs import oracle, working
from runs import assert_refused, counted, draw, launch, leaf

import dualpipe_lab as lab
from dualpipe_lab.ep.all_to_all import (
    Splits,
    all_to_all_rows_async,
    combine,
    combine_async,
    dispatch,
    dispatch_async,
    exchange_counts,
    exchange_splits,
)
from dualpipe_lab.launch.context import rank_context

TABLES = {
    1: [[[3]], [[0]]],
    3: [oracle("all_to_all")["send_counts"], [[0, 0, 4], [0, 0, 0], [0, 0, 1]]],
    4: [[[1] * 4] * 4, [[0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]],
}


def named_rows(table, rank):
    """Rows that say where they come from, where they go and which they are: (source, destination, number)."""
    return torch.tensor(
        [[rank, to, row] for to, rows in enumerate(table[rank]) for row in range(rows)], dtype=torch.float64
    ).view(-1, 3)


def arrived(table, rank):
    return torch.tensor(
        [[source, rank, row] for source, sends in enumerate(table) for row in range(sends[rank])], dtype=torch.float64
    ).view(-1, 3)


def exchanged(rank, world_size, tables):
    found = []
    for table in tables:
        for way in ("plain", "issued"):
            splits = exchange_splits(table[rank])
            x = leaf(named_rows(table, rank))
            y = dispatch(x, splits) if way == "plain" else dispatch_async(x, splits).wait()
            (y * y).sum().backward()  # dy = 2 y, so the gradient is each row's own numbers, twice
            back = combine(y, splits) if way == "plain" else combine_async(y, splits).wait()
            found.append((table, splits, y.detach(), x.grad, x.detach(), back.detach()))
    return found


@pytest.mark.parametrize(
    "world_size", [3, pytest.param(1, marks=pytest.mark.every), pytest.param(4, marks=pytest.mark.every)]
)
def test_every_row_arrives_and_its_gradient_returns(world_size):
    """Even and uneven blocks, blocks of no rows, ranks that send or receive nothing: the same bits."""
    for rank, found in enumerate(launch(exchanged, world_size, TABLES[world_size])):
        assert found
        for table, splits, y, dx, x, back in found:
            assert splits == Splits(tuple(table[rank]), tuple(sends[rank] for sends in table))
            assert torch.equal(y, arrived(table, rank))
            assert torch.equal(dx, 2 * x)
            assert torch.equal(back, x)


def test_the_oracle():
    block = oracle("all_to_all")

    def fn(rank, world_size):
        names = block["send_buffers"][rank]
        numbers = torch.tensor([[float(all_names.index(name))] for name in names]).view(-1, 1)
        return [all_names[int(row)] for row in dispatch(numbers, exchange_splits(block["send_counts"][rank])).flatten()]

    all_names = [name for names in block["send_buffers"] for name in names]
    assert launch(fn, 3) == block["recv_buffers"]


def test_bytes_are_those_of_the_rows_for_others():
    table = TABLES[4][1]

    def fn(rank, world_size):
        splits, x = exchange_splits(table[rank]), leaf(named_rows(table, rank))
        return [
            counted(lambda: exchange_splits(table[rank])),
            counted(lambda: all_to_all_rows_async(x, splits).wait()),
            counted(lambda: dispatch(x, splits).sum().backward()),
            counted(lambda: dispatch_async(x, splits).wait().sum().backward()),
        ]

    row = 3 * 8
    for rank, (counts, one_way, both, issued) in enumerate(launch(fn, 4)):
        there = (sum(table[rank]) - table[rank][rank]) * row
        back = (sum(sends[rank] for sends in table) - table[rank][rank]) * row
        assert counts == {"all_to_all_single": (1, 3 * 8)}
        assert one_way == {"all_to_all_single": (1, there)}
        assert both == issued == {"all_to_all_single": (2, there + back)}


def test_strided_rows_and_any_shape_are_sent():
    def fn(rank, world_size):
        x = draw(rank, 6, 4)
        splits = exchange_splits([1, 2])
        strided = dispatch(x[::2, :2], splits)
        cube = dispatch(x[:3].view(3, 2, 2).transpose(1, 2), splits)
        return strided, cube, exchange_counts(torch.tensor([[rank, 1], [2, rank]]).t())

    for rank, (strided, cube, counts) in enumerate(launch(fn, 2)):
        block = slice(0, 1) if rank == 0 else slice(1, 3)
        sources = [draw(source, 6, 4) for source in range(2)]
        assert torch.equal(strided, torch.cat([x[::2, :2][block] for x in sources]))
        assert torch.equal(cube, torch.cat([x[:3].view(3, 2, 2).transpose(1, 2)[block] for x in sources]))
        assert counts.tolist() == [[[0, 2], [1, 2]], [[1, 0], [1, 1]]][rank]


def test_other_work_lies_between_issue_and_wait_in_both_directions():
    """The virtual clock: an exchange of 8 ms and work of 5 forward, 6 backward take max, not sum."""

    work = working(5, 6)

    def fn(rank, world_size, early):
        x = leaf(draw(rank, 2, 62_500))  # one row for the other: 500 kB, 4 ms at 1 Gbit/s
        splits, times = Splits((1, 1), (1, 1)), []
        issued = dispatch_async(x, splits)
        rows = issued.wait() if early else None
        other = work(x)
        y = other + (issued.wait() if rows is None else rows)
        times.append(rank_context().clock.now())
        y.sum().backward()
        return [*times, rank_context().clock.now()]

    def run(early):
        return launch(fn, 2, early, clock="virtual", link=lab.Link(gbps=1))

    assert run(early=False) == [[5_000_000, 11_000_000]] * 2
    assert run(early=True) == [[9_000_000, 19_000_000]] * 2


def test_a_second_wait_returns_the_same_rows_and_their_gradient_is_sent_once():
    def fn(rank, world_size):
        splits, x = Splits((1, 1), (1, 1)), leaf(torch.full((2, 1), float(rank)))
        plain = dispatch_async(x.detach(), splits).wait()
        assert (plain.flatten().tolist(), plain.requires_grad) == ([0, 1], False)
        handle = dispatch_async(x, splits)
        rows, again = handle.wait(), handle.wait()
        sent = counted(lambda: (rows + again).sum().backward())
        return rows is again, x.grad.flatten().tolist(), sent["all_to_all_single"]

    assert launch(fn, 2) == [(True, [2, 2], (1, 4))] * 2


def test_counts_that_fit_no_rank_and_rows_that_the_splits_do_not_make_up_are_refused():
    cases = [
        (lambda: exchange_splits([1]), "one number of rows from 0 for each of 2 ranks"),
        (lambda: exchange_splits([2, -1]), "-1"),
        (lambda: dispatch(torch.ones(4, 1), Splits((1, 2), (1, 2))), "must be 2 numbers that sum to 4 rows"),
    ]
    assert_refused(2, cases)
