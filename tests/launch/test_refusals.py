"""What launch refuses before any process starts, and what it says."""

import pytest
import torch

import dualpipe_lab as lab

BAD = [
    ({"world_size": 0}, "world_size to be a whole number from 1, got 0"),
    ({"world_size": 2.0}, "got 2.0"),
    ({"world_size": 1000}, "128 at most, got world_size=1000; use simulate"),
    ({"threads": 0}, "threads to be a whole number from 1"),
    ({"timeout": 0}, "timeout > 0 seconds, got 0"),
    ({"timeout": "x"}, "timeout > 0 seconds, got 'x'"),
    ({"output": "loud"}, "output=ordered, live, collect, got 'loud'"),
    ({"clock": "sun"}, "clock=wall, virtual, got 'sun'"),
    ({"backend": "mpi"}, "backend=gloo, nccl, got 'mpi'"),
    ({"start": "fork"}, "launch knows start=forkserver, spawn, got 'fork'"),
    ({"link": 1.0}, "link to be a Link"),
]


def test_bad_arguments_are_refused():
    for arguments, message in BAD:
        with pytest.raises(ValueError, match=message):
            lab.launch(print, **{"world_size": 1, **arguments})


def test_nccl_without_gpus_says_so_and_the_guard_skips_the_cell(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="NCCL needs"):
        lab.launch(print, 2, backend="nccl")
    assert not lab.nccl_ready(2)
    assert capsys.readouterr().out.startswith("skipped: NCCL needs")


def test_what_cannot_travel_is_refused_with_a_remedy():
    import threading

    lock = threading.Lock()

    def fn(rank, world_size):
        return lock

    with pytest.raises(TypeError, match="create such objects inside fn"):
        lab.launch(fn, 2)
    with pytest.raises(TypeError, match="got int"):
        lab.launch(3, 2)


def test_comm_and_compute_outside_of_a_rank_say_where_they_belong():
    for call in (lambda: lab.compute(1), lambda: lab.comm.all_reduce(torch.ones(1))):
        with pytest.raises(RuntimeError, match="no rank here"):
            call()


def test_a_function_that_does_not_take_the_arguments_is_refused_before_any_process_starts(leftovers):
    def fn(rank):
        return rank

    with pytest.raises(TypeError, match=r"but fn\(rank\) does not fit: too many positional arguments"):
        lab.launch(fn, 2)
    with pytest.raises(TypeError, match="with 1 further arguments"):
        lab.launch(lambda rank, world_size: None, 2, "extra")
    leftovers.check()
