"""Every way a rank can fail: the message names rank, line and cause, and it comes quickly."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import dualpipe_lab as lab
from dualpipe_lab import comm


@pytest.fixture(autouse=True)
def nothing_left_behind(leftovers):
    yield
    leftovers.check()


def failing(fn, world_size=3, within=1.5, **options):
    """The error of a launch that must fail within so many seconds of the last rank's start."""
    lab.launch(lambda rank, world_size: None, world_size)  # the server is up
    started = time.perf_counter()
    with pytest.raises((lab.RankError, lab.RankTimeout)) as caught:
        lab.launch(fn, world_size, **options)
    assert time.perf_counter() - started < within
    return caught.value


def test_a_raising_rank_is_named_with_its_line():
    def fn(rank, world_size):
        if rank == 1:
            raise ValueError("bad shape")
        comm.all_reduce(torch.ones(2))

    error = failing(fn)
    text = str(error)
    assert text.startswith("rank 1 of 3 raised ValueError: bad shape\n")
    assert "test_failures.py, line" in text
    assert 'in fn:  raise ValueError("bad shape")' in text
    assert "rank 0: waits for all_reduce shape (2,)" in text
    assert isinstance(error.failures[1].exception, ValueError)
    assert list(error.failures) == [1]


def test_peers_that_compute_are_stopped_at_once():
    def fn(rank, world_size):
        if rank == 0:
            raise KeyError("x")
        time.sleep(60)

    text = str(failing(fn))
    assert "rank 0 of 3 raised KeyError: 'x'" in text
    assert "rank 1: is not in communication" in text
    assert "stopped by the launcher" in text


def test_all_failing_ranks_are_reported():
    def fn(rank, world_size):
        raise ValueError(rank)

    assert set(failing(fn).failures) == {0, 1, 2}


def test_a_killed_rank():
    def fn(rank, world_size):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(torch.ones(2))

    error = failing(fn)
    assert str(error).startswith("rank 1 of 3 died without an exception (SIGKILL)")
    assert all(failure.secondary for rank, failure in error.failures.items() if rank != 1)


def test_an_exiting_rank():
    def fn(rank, world_size):
        if rank == 2:
            os._exit(3)
        comm.barrier()

    assert "rank 2 of 3 died without an exception (exit code 3)" in str(failing(fn))


def test_a_rank_that_calls_sys_exit():
    def fn(rank, world_size):
        raise SystemExit(4)

    assert "rank 0 of 1 left with sys.exit(4)" in str(failing(fn, 1))


def test_a_segfault_shows_the_line():
    def fn(rank, world_size):
        if rank == 0:
            import ctypes

            ctypes.string_at(0)
        comm.barrier()

    text = str(failing(fn))
    assert "rank 0 of 3 died without an exception (SIGSEGV)" in text
    assert "in fn" in text
    assert "Fatal Python error: Segmentation fault" in text


def test_a_ring_of_blocking_receives_is_explained():
    def fn(rank, world_size):
        x = torch.ones(4)
        comm.recv(x, (rank - 1) % world_size, tag=9)
        comm.send(x, (rank + 1) % world_size, tag=9)

    error = failing(fn, within=4)
    text = str(error)
    assert isinstance(error, lab.RankTimeout)
    assert "rank 0: waits for recv from rank 2 tag 9 shape (4,)" in text
    assert "deadlock: rank 0 -> rank 2 -> rank 1 -> rank 0 (each waits for the next)" in text
    assert "rank 2 has no send to rank 0 in flight" in text


def test_two_blocking_sends_are_explained():
    def fn(rank, world_size):
        comm.send(torch.ones(1), 1 - rank)
        comm.recv(torch.ones(1), 1 - rank)

    assert "deadlock: rank 0 -> rank 1 -> rank 0" in str(failing(fn, 2, within=4))


def test_a_tag_mismatch_is_suspected():
    def fn(rank, world_size):
        if rank == 0:
            comm.send(torch.ones(3), 1, tag=2)
        else:
            comm.recv(torch.ones(3), 0, tag=3)

    text = str(failing(fn, 2, within=4))
    assert "tag mismatch? rank 1 waits for tag 3 from rank 0, whose unreceived sends to it have tag 2" in text


def test_a_rank_that_never_joins():
    def fn(rank, world_size):
        if rank != 2:
            comm.all_reduce(torch.ones(2))

    text = str(failing(fn, within=4))
    assert "all_reduce: rank 2 never joined" in text
    assert "rank 2 returned without it" in text


def test_a_rank_that_computes_on_is_no_deadlock():
    def fn(rank, world_size):
        if rank == 0:
            time.sleep(3.5)
        comm.all_reduce(torch.ones(2))
        return "fine"

    assert lab.launch(fn, 2) == ["fine", "fine"]


def test_a_rank_that_waits_for_nothing_runs_into_the_time_limit():
    def fn(rank, world_size):
        if rank == 0:
            time.sleep(60)
        comm.all_reduce(torch.ones(2))

    text = str(failing(fn, 2, within=3, timeout=1))
    assert "the time limit of 1 s passed" in text
    assert "rank 0: is not in communication" in text
    assert "in fn" in text
    assert "all_reduce: rank 0 never joined" in text


def test_different_collectives_are_named():
    def fn(rank, world_size):
        x = torch.ones(4)
        if rank == 0:
            comm.all_reduce(x)
        else:
            comm.all_to_all_single(torch.ones(4), x)

    text = str(failing(fn, 2, within=4))
    assert "rank 0 in all_reduce, rank 1 in all_to_all_single" in text or "where rank 0 called all_reduce" in text


def test_check_lets_torch_compare_collectives_first():
    def fn(rank, world_size):
        comm.all_reduce(torch.ones(2 + rank))

    assert "Detected mismatch between collectives" in str(failing(fn, 2, within=4, check=True))


def test_plain_torch_deadlocks_are_explained_too():
    def fn(rank, world_size):
        if rank == 0:
            dist.recv(torch.ones(2), 1)
        else:
            dist.all_reduce(torch.ones(2))

    text = str(failing(fn, 2, within=4))
    assert "rank 0: waits for recv from rank 1 tag 0 shape (2,)" in text
    assert "rank 1: waits for all_reduce shape (2,) (plain torch.distributed)" in text


def test_a_rank_that_holds_the_interpreter_is_located():
    def fn(rank, world_size):
        if rank == 1:
            import ctypes

            ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock
        comm.barrier()

    text = str(failing(fn, 2, within=4, timeout=1))
    assert "rank 1: holds the interpreter's lock" in text
    assert "in fn" in text


def test_a_strided_slice_is_refused():
    def fn(rank, world_size):
        comm.all_reduce(torch.ones(4, 4)[:, 1])

    text = str(failing(fn, 2))
    assert "all_reduce needs a contiguous tensor, got shape (4,) with strides (4,)" in text


def test_a_function_that_cannot_be_rebuilt_names_the_cause(tmp_path, monkeypatch):
    (tmp_path / "vanishing.py").write_text("def fn(rank, world_size):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import vanishing

    (tmp_path / "vanishing.py").unlink()
    assert "ModuleNotFoundError: No module named 'vanishing'" in str(failing(vanishing.fn, 2))


def test_an_edited_module_on_disk_is_seen(tmp_path, monkeypatch):
    (tmp_path / "edited.py").write_text("def fn(rank, world_size):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import edited

    assert lab.launch(edited.fn, 1) == [1]
    (tmp_path / "edited.py").write_text("def fn(rank, world_size):\n    return 22\n")
    assert lab.launch(edited.fn, 1) == [22]


def test_a_killed_fork_server_is_restarted():
    from multiprocessing import forkserver

    lab.launch(lambda rank, world_size: None, 1)
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    assert lab.launch(lambda rank, world_size: rank, 2) == [0, 1]


def test_a_lost_message_is_mentioned():
    def fn(rank, world_size):
        if rank == 0:
            comm.isend(torch.ones(3), 1)

    with pytest.warns(UserWarning, match="rank 0 sent 12 bytes to rank 1, which never received it"):
        lab.launch(fn, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comm.send(torch.ones(1), 0), "rank 0 cannot exchange messages with itself"),
        (lambda: comm.send(torch.ones(1), 7), "rank 7 is not among the ranks"),
        (lambda: comm.send(torch.ones(1), 1, tag=-1), "a tag is at least 0, got -1"),
        (lambda: comm.all_reduce(torch.ones(1), op="mean"), "one of sum, avg, max, min, product, got 'mean'"),
        (lambda: comm.all_reduce([1.0]), "works on tensors, got list"),
        (lambda: comm.all_gather_single(torch.ones(3), torch.ones(2)), "output needs 4 elements"),
        (lambda: comm.reduce_scatter_single(torch.ones(3), torch.ones(2)), "input needs 6 elements"),
        (lambda: comm.all_to_all_single(torch.ones(3), torch.ones(2)), "3 rows of output do not divide"),
        (lambda: comm.all_to_all_single(torch.ones(2), torch.ones(2), [1, 2], [1, 1]), "2 numbers that sum to 2 rows"),
        (lambda: comm.broadcast(torch.ones(1), 5), "rank 5 is not among the ranks"),
        (lambda: comm.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2)), "pad uneven tensors"),
        (lambda: comm.all_gather([torch.ones(2)], torch.ones(2)), "one tensor per rank in outputs, got 1 for 2 ranks"),
        (lambda: comm.gather(torch.ones(2), None, 0), "outputs belong on rank 0 and on no other"),
        (lambda: comm.new_group([0, 0]), "different ranks of 0..1"),
        (lambda: lab.compute(-1), "no less than 0 ms, got -1"),
    ],
)
def test_bad_calls_are_refused_before_they_can_hang(call, message):
    def fn(rank, world_size):
        if rank == 0:
            call()

    assert message in str(failing(fn, 2))


def test_a_message_larger_than_its_tensor_names_the_line():
    def fn(rank, world_size):
        if rank:
            comm.send(torch.ones(4), 0)
        else:
            comm.recv(torch.ones(3), 1)

    text = str(failing(fn, 2))
    assert "rank 0 of 2 died without an exception (SIGABRT)" in text
    assert "in fn" in text


def test_a_message_smaller_than_its_tensor_is_no_silent_success():
    def fn(rank, world_size):
        if rank:
            comm.send(torch.ones(3), 0)
        else:
            comm.recv(torch.ones(4), 1)

    assert "rank 0 of 2 received 12 bytes from rank 1 into a tensor of 16" in str(failing(fn, 2))


@pytest.mark.parametrize("call", [comm.all_reduce, lambda x: comm.broadcast(x, 0)])
def test_collectives_of_different_sizes_are_no_silent_success(call):
    def fn(rank, world_size):
        call(torch.ones(3 + rank))

    text = str(failing(fn, 2, within=4))
    assert "of 4 elements as collective 0 of ranks [0, 1], where rank 0 called" in text
