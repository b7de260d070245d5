"""A launch leaves no process and no folder; while it runs, nothing listens but loopback."""

import os
import time

import psutil

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.folder import PREFIX, private_folder, sweep


def test_processes_that_a_rank_started_end_with_it(leftovers):
    def fn(rank, world_size):
        import subprocess

        return subprocess.Popen(["sleep", "60"]).pid

    pids = lab.launch(fn, 2)
    time.sleep(0.2)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
    leftovers.check()


def test_ranks_connect_and_listen_on_loopback_only():
    def fn(rank, world_size):
        comm.barrier()
        addresses = {connection.laddr.ip for connection in psutil.Process().net_connections("inet")}
        comm.barrier()
        return addresses

    for addresses in lab.launch(fn, 3):
        assert addresses
        assert addresses <= {"127.0.0.1", "::1"}


def test_the_private_folder_is_readable_by_its_owner_alone_and_goes(tmp_path):
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o077 == 0
        assert sweep() == []
        assert folder.exists()
    assert not folder.exists()


def test_sweeping_removes_the_folders_of_the_dead_only(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = tmp_path / f"{PREFIX}4194305-x"  # above Linux's largest process number
    mine = tmp_path / f"{PREFIX}{os.getpid()}-x"
    other = tmp_path / "something-else-1-x"
    for folder in (dead, mine, other):
        folder.mkdir()
    (dead / "lock").touch()
    assert sweep() == [dead]
    assert (dead.exists(), mine.exists(), other.exists()) == (False, True, True)


def test_a_locked_folder_of_an_unknown_process_stays(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    elsewhere = tmp_path / f"{PREFIX}4194305-x"  # its owner lives in another container
    elsewhere.mkdir()
    with open(elsewhere / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep() == []
    assert sweep() == [elsewhere]
