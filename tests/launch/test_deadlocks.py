"""Ranks that wait for ever, and some that only seem to: who waits for whom and why, long before the time limit."""

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.record.operation import Communicator
from dualpipe_lab.launch.record.rank_status import Blocked, RankStatus
from dualpipe_lab.launch.supervise.diagnosis import is_stuck


@pytest.fixture(autouse=True)
def nothing_left_behind(leftovers):
    yield
    leftovers.check()


def test_a_ring_of_blocking_receives_is_explained(failing):
    def fn(rank, world_size):
        x = torch.ones(4)
        comm.recv(x, (rank - 1) % world_size, tag=9)
        comm.send(x, (rank + 1) % world_size, tag=9)

    error = failing(fn)
    text = str(error)
    assert isinstance(error, lab.RankTimeout)
    assert "rank 0: waits for recv from rank 2 tag 9 shape (4,)" in text
    assert "deadlock: rank 0 -> rank 2 -> rank 1 -> rank 0 (each waits for the next)" in text
    assert "rank 2 has no send to rank 0 in flight" in text


def test_a_rank_that_never_joins(failing):
    def fn(rank, world_size):
        if rank != 2:
            comm.all_reduce(torch.ones(2))

    text = str(failing(fn))
    assert "all_reduce: rank 2 never joined" in text
    assert "rank 2 returned without it" in text


def test_a_rank_that_computes_on_is_no_deadlock():
    def fn(rank, world_size):
        if rank == 0:
            time.sleep(3.5)
        comm.all_reduce(torch.ones(2))
        return "fine"

    assert lab.launch(fn, 2) == ["fine", "fine"]


def test_different_collectives_are_named(failing):
    def fn(rank, world_size):
        x = torch.ones(4)
        if rank == 0:
            comm.all_reduce(x)
        else:
            comm.all_to_all_single(torch.ones(4), x)

    text = str(failing(fn, 2))
    assert "rank 0 in all_reduce, rank 1 in all_to_all_single" in text or "where rank 0 called all_reduce" in text


def test_check_lets_torch_compare_collectives_first(failing):
    def fn(rank, world_size):
        comm.all_reduce(torch.ones(2 + rank))

    assert "Detected mismatch between collectives" in str(failing(fn, 2, check=True))


def test_plain_torch_deadlocks_are_explained_too(failing):
    def fn(rank, world_size):
        if rank == 0:
            dist.recv(torch.ones(2), 1)
        else:
            dist.all_reduce(torch.ones(2))

    text = str(failing(fn, 2))
    assert "rank 0: waits for recv from rank 1 tag 0 shape (2,)" in text
    assert "rank 1: waits for all_reduce shape (2,) (plain torch.distributed)" in text


def test_a_rank_that_makes_no_group_is_named(failing):
    def fn(rank, world_size):
        if rank != 2:
            comm.new_group([0, 1])

    text = str(failing(fn))
    assert "rank 0: waits for new_group of ranks [0, 1]" in text
    assert "new_group: rank 2 never joined" in text


def test_a_collective_that_all_ranks_have_reached_is_slow_and_no_deadlock():
    def status(rank, ranks, text="all_reduce"):
        blocked = Blocked("all_reduce", text, communicator=Communicator(ranks))
        return RankStatus(rank, blocked, False, 1.0, 5, 0.0, Counter(), Counter(), {}, {}, [])

    def stuck(*texts):
        found = {rank: status(rank, tuple(range(len(texts))), text) for rank, text in enumerate(texts)}
        return is_stuck(found, found, 1.0)

    assert not stuck("all_reduce", "all_reduce")
    assert stuck("all_reduce", "all_reduce of another shape")
    apart = {0: status(0, (0, 1)), 1: status(1, (1, 2)), 2: status(2, (0, 2))}
    assert is_stuck(apart, apart, 1.0)
