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


def test_two_blocking_sends_are_explained(failing):
    def fn(rank, world_size):
        comm.send(torch.ones(1), 1 - rank)
        comm.recv(torch.ones(1), 1 - rank)

    assert "deadlock: rank 0 -> rank 1 -> rank 0" in str(failing(fn, 2))


def test_a_tag_mismatch_is_suspected(failing):
    def fn(rank, world_size):
        if rank == 0:
            comm.send(torch.ones(3), 1, tag=2)
        else:
            comm.recv(torch.ones(3), 0, tag=3)

    text = str(failing(fn, 2))
    assert "tag mismatch? rank 1 waits for tag 3 from rank 0, whose unreceived sends to it have tag 2" in text


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


def test_a_rank_that_waits_for_nothing_runs_into_the_time_limit(failing):
    def fn(rank, world_size):
        if rank == 0:
            time.sleep(60)
        comm.all_reduce(torch.ones(2))

    text = str(failing(fn, 2, timeout=1))
    assert "the time limit of 1 s passed" in text
    assert "rank 0: is not in communication" in text
    assert "in fn" in text
    assert "all_reduce: rank 0 never joined" in text


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


@pytest.mark.parametrize("limit", [1, 3])
def test_a_rank_that_holds_the_interpreter_is_located(limit, failing):
    def fn(rank, world_size):
        if rank == 1:
            import ctypes

            ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock
        comm.barrier()

    text = str(failing(fn, 2, timeout=limit))
    assert "rank 0: waits for barrier" in text
    assert "rank 1: holds the interpreter's lock" in text
    assert "in fn" in text


@pytest.mark.parametrize("call", [comm.all_reduce, lambda x: comm.broadcast(x, 0)])
def test_collectives_of_different_sizes_are_no_silent_success(call, failing):
    def fn(rank, world_size):
        call(torch.ones(3 + rank))

    text = str(failing(fn, 2))
    assert "of 4 elements of float32 as collective 0 of ranks [0, 1], where rank 0 called" in text


@pytest.mark.parametrize("limit", [1, 3])
def test_a_rank_that_answers_is_not_said_to_hold_the_interpreter(limit, failing):
    def fn(rank, world_size):
        if rank == 1:
            while True:
                time.sleep(0.01)
        comm.barrier()

    text = str(failing(fn, 2, timeout=limit))
    assert "interpreter's lock" not in text
    assert "rank 0: waits for barrier" in text
    assert "rank 1: is not in communication" in text
    assert "barrier: rank 1 never joined" in text


def test_two_roots_of_a_broadcast_are_named(failing):
    def fn(rank, world_size):
        comm.broadcast(torch.ones(4), rank)

    text = str(failing(fn, 2))
    assert "called broadcast from rank 1 of 4 elements of float32" in text
    assert "where rank 0 called broadcast from rank 0 of 4 elements of float32" in text


def test_a_send_to_a_rank_that_returned_is_explained(failing):
    def fn(rank, world_size):
        if rank == 0:
            comm.send(torch.ones(3), 1, tag=5)

    assert "rank 1 returned without receiving what rank 0 sends with tag 5" in str(failing(fn, 2))


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
