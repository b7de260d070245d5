"""Without a fork server: spawned ranks, and the fall-back to them."""

import multiprocessing
import warnings

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch import server


def fn(rank, world_size):
    import torch

    x = torch.ones(1)
    comm.all_reduce(x)
    print(rank)
    return x.item()


def test_spawn_when_asked_for_is_torch_s_own(monkeypatch, capsys):
    calls = []
    real = torch.multiprocessing.spawn

    def spy(*args, **options):
        calls.append(options["nprocs"])
        return real(*args, **options)

    monkeypatch.setattr(torch.multiprocessing, "spawn", spy)
    monkeypatch.setenv(server.OVERRIDE, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # who asks for it knows that it is slow
        values = lab.launch(fn, 2, start="spawn")
    assert values == [2, 2]
    assert calls == [2]
    assert capsys.readouterr().out == "0\n1\n"


def test_a_fork_server_that_does_not_work_is_replaced_with_a_word(monkeypatch):
    monkeypatch.setenv(server.OVERRIDE, "")
    real = server._start_forked

    def start_forked():
        rank = real()
        rank.kill()
        rank.channel.close()  # it may have said hello already
        rank.channel, far = multiprocessing.Pipe()
        far.close()
        return rank

    monkeypatch.setattr(server, "_start_forked", start_forked)
    with pytest.warns(UserWarning, match="forked ranks die on this machine"):
        assert len(lab.launch(fn, 1)) == 1


def test_an_unknown_start_method_is_refused(monkeypatch):
    monkeypatch.setenv(server.OVERRIDE, "fork")
    with pytest.raises(ValueError, match="DUALPIPE_LAB_START is forkserver or spawn, got 'fork'"):
        lab.launch(fn, 1)


def test_a_platform_without_fork_server_spawns_and_says_why(monkeypatch):
    monkeypatch.setenv(server.OVERRIDE, "")
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.warns(UserWarning, match="this platform has no fork server, so ranks are spawned: each imports torch"):
        assert len(lab.launch(fn, 1)) == 1
