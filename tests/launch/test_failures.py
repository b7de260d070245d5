"""Ranks that fail and calls that are refused: the message names rank, line and cause; more ends are in `drills`."""

import os
import signal
import time

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm, cp, ep, tp
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.ep.all_to_all import Splits
from dualpipe_lab.launch.rank import rank_status
from dualpipe_lab.tp import mappings


@pytest.fixture(autouse=True)
def nothing_left_behind(leftovers):
    yield
    leftovers.check()


def failure(fn, world_size=3):
    """The error of a launch, which comes before the time limit."""
    with pytest.raises(lab.RankError) as caught:
        lab.launch(fn, world_size, timeout=120)
    return caught.value


def test_a_raising_rank_is_named_with_its_line():
    def fn(rank, world_size):
        if rank == 1:
            time.sleep(0.5)  # on a busy machine the others need this to get there
            raise ValueError("bad shape")
        comm.all_reduce(torch.ones(2))

    error = failure(fn)
    text = str(error)
    assert text.startswith("rank 1 of 3 raised ValueError: bad shape\n")
    assert "test_failures.py, line" in text
    assert 'in fn:  raise ValueError("bad shape")' in text
    assert "rank 0: waits for all_reduce shape (2,)" in text
    assert isinstance(error.failures[1].exception, ValueError)
    assert list(error.failures) == [1]


def test_a_rank_that_has_not_begun_is_reported_by_its_number():
    """Its peer may fail before it: a status is asked of a process that has a job and no context yet."""
    assert rank_status(1).rank == 1


def test_a_killed_rank():
    def fn(rank, world_size):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(torch.ones(2))

    error = failure(fn)
    assert str(error).startswith("rank 1 of 3 died without an exception (SIGKILL)")
    assert all(failure.secondary for rank, failure in error.failures.items() if rank != 1)


def test_a_function_that_cannot_be_rebuilt_names_the_cause(tmp_path, monkeypatch):
    (tmp_path / "vanishing.py").write_text("def fn(rank, world_size):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import vanishing

    (tmp_path / "vanishing.py").unlink()
    assert "ModuleNotFoundError: No module named 'vanishing'" in str(failure(vanishing.fn, 2))


def test_an_edited_module_on_disk_is_seen(tmp_path, monkeypatch):
    (tmp_path / "edited.py").write_text("def fn(rank, world_size):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import edited

    assert lab.launch(edited.fn, 1) == [1]
    (tmp_path / "edited.py").write_text("def fn(rank, world_size):\n    return 22\n")
    assert lab.launch(edited.fn, 1) == [22]


def test_a_lost_message_is_mentioned():
    def fn(rank, world_size):
        if rank == 0:
            comm.isend(torch.ones(3), 1)

    with pytest.warns(UserWarning, match="rank 0 sent 12 bytes to rank 1, which never received it"):
        lab.launch(fn, 2)


REFUSED = [
    (lambda: comm.send(torch.ones(1), 0), "rank 0 cannot exchange messages with itself"),
    (lambda: comm.send(torch.ones(1), 7), "rank 7 is not among the ranks"),
    (lambda: comm.send(torch.ones(1), 1, tag=-1), "a tag is at least 0, got -1"),
    (lambda: comm.all_reduce(torch.ones(1), op="mean"), "one of sum, avg, max, min, product, got 'mean'"),
    (lambda: comm.all_reduce(torch.ones(4, 4)[:, 1]), "a contiguous tensor, got shape (4,) with strides (4,)"),
    (lambda: comm.all_reduce([1.0]), "works on tensors, got list"),
    (lambda: comm.all_gather_single(torch.ones(3), torch.ones(2)), "output needs 4 elements"),
    (lambda: comm.reduce_scatter_single(torch.ones(3), torch.ones(2)), "input needs 6 elements"),
    (lambda: comm.reduce_scatter_single(torch.ones(1), torch.ones(2).double()), "give both one type"),
    (lambda: comm.reduce_scatter_single(torch.ones(1).int(), torch.ones(2).int(), "avg"), "sum, then divide"),
    (lambda: comm.all_to_all_single(torch.ones(3), torch.ones(2)), "3 rows of output do not divide"),
    (lambda: comm.all_to_all_single(torch.ones(2), torch.ones(2), [1, 2], [1, 1]), "2 numbers that sum to 2 rows"),
    (lambda: comm.broadcast(torch.ones(1), 5), "rank 5 is not among the ranks"),
    (lambda: comm.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2)), "pad uneven tensors"),
    (lambda: comm.all_gather([torch.ones(2)], torch.ones(2)), "one tensor per rank in outputs, got 1 for 2 ranks"),
    (lambda: comm.gather(torch.ones(2), None, 0), "outputs belong on rank 0 and on no other"),
    (lambda: comm.new_group([0, 0]), "different ranks of 0..1"),
    (lambda: lab.compute(-1), "no less than 0 ms, got -1"),
]
X, SPLITS = torch.ones(2, 2, 2, requires_grad=True), Splits((1, 1), (1, 1))
TAKE_GROUPS = [
    lambda group: comm.all_reduce(X.detach(), group=group),
    comm.get_rank,
    lambda group: mappings.copy_to_ranks(X, group),
    lambda group: mappings.reduce_from_ranks(X, group),
    lambda group: mappings.gather_from_ranks(X, group=group),
    lambda group: mappings.slice_to_ranks(X, group=group),
    lambda group: mappings.gather_tokens(X, group),
    lambda group: mappings.reduce_scatter_tokens(X, group),
    lambda group: cp.ring_softmax(X, group),
    lambda group: cp.all_reduce_softmax(X, group),
    lambda group: cp.unshard_sequence(X, make_layout("contiguous", 4, 2), group=group),
    lambda group: cp.ring_all_reduce(X.detach(), group),
    lambda group: ep.dispatch(X, SPLITS, group),
    lambda group: ep.combine(X, SPLITS, group),
]
REFUSED += [  # options, or a dimension, in the place of a group, and a group in that of a dimension
    (lambda call=call, group=group: call(group), f"a collective takes a process group, got {kind}; give ")
    for call in TAKE_GROUPS
    for kind, group in {"TensorParallel": tp.TensorParallel(), "int": -1}.items()
]
REFUSED += [
    (lambda call=call: call(X, torch.distributed.group.WORLD), "a dimension is a number, got ProcessGroup")
    for call in (mappings.gather_from_ranks, mappings.slice_to_ranks)
]


def test_bad_calls_are_refused_before_they_can_hang():
    def fn(rank, world_size):
        found = []
        for call, _ in REFUSED if rank == 0 else ():
            with pytest.raises((TypeError, ValueError)) as caught:
                call()
            found.append(str(caught.value))
        return found

    found, _ = lab.launch(fn, 2)
    for text, (_, message) in zip(found, REFUSED, strict=True):
        assert message in text


@pytest.mark.parametrize("kind", ["message", "note", "exit", "group"])
def test_the_middle_of_a_long_text_is_left_out_of_the_message(kind):
    def fn(rank, world_size):
        text = "begin" + "x" * 3_000_000 + "end"
        if kind == "exit":
            raise SystemExit(text)
        error = ExceptionGroup("group", [ValueError(text)] * 3) if kind == "group" else ValueError(text)
        if kind == "note":
            error.add_note(text)
        raise error

    with pytest.raises(lab.RankError) as caught:
        lab.launch(fn, 2, timeout=60)
    message = str(caught.value)
    assert len(message) < 50_000
    assert "characters left out; `RankError.failures` has them" in message
    assert "begin" in message
    failure = caught.value.failures[0]
    assert len(failure.traceback) > 3_000_000, "nothing is lost"
    assert len(str(failure)) < 5_000
