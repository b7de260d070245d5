"""Ranks that end badly, machines that are odd: each ends with the right words and leaves nothing behind."""

import json
import resource
import signal
import subprocess
import time

import pytest
from drilled import PATIENCE, Drill

ALL = """
import json, textwrap
drills = json.loads(sys.stdin.read())
told = {}
for name, (ranks, body, limit) in drills.items():
    exec("def fn(rank, world_size):\\n" + textwrap.indent(body, "    "))
    try:
        told[name] = f"values {lab.launch(fn, ranks, timeout=limit)}"
    except (lab.RankError, lab.RankTimeout) as error:
        told[name] = str(error)
print(json.dumps(told))
"""


def run_all(folder, drills):
    """Run many drills one after the other in one process; return what each was told, and what all of them left."""
    drill = Drill(folder)
    with drill.start(ALL, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(json.dumps(drills), timeout=5 * PATIENCE)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), drill.left()


ENDS = {
    "sys.exit": (2, "sys.exit(3)", "left with sys.exit(3)"),
    "os._exit without an error": (2, "os._exit(0)", "died without an exception (exit code 0)"),
    "an abort": (2, "os.abort()", "died without an exception (SIGABRT)\n"),
    "sizes that differ": (
        2,
        "comm.all_reduce(torch.ones(5 - 2 * rank))",
        "all_reduce of 3 elements of float32",
        "all_reduce of 5 elements of float32",
        "the same shape and dtype on every rank",
    ),
    "dtypes of one width": (
        2,
        "comm.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[rank]))",
        "called all_reduce of 4 elements of int32 as collective 0 of ranks [0, 1], where rank 0 called",
    ),
    "a message longer than its tensor": (
        2,
        "comm.send(torch.ones(8), 1) if rank == 0 else comm.recv(torch.ones(4), 0)",
        "rank 1 called recv from rank 0 tag 0 shape (4,) float32, rank 0 send to rank 1 tag 0 shape (8,) float32",
        "in fn",
    ),
    "a message shorter than its tensor": (
        2,
        "comm.send(torch.ones(4), 1) if rank == 0 else comm.recv(torch.ones(8), 0)",
        "received 16 bytes from rank 0 into a tensor of 32",
    ),
    "two roots": (
        2,
        "comm.broadcast(torch.ones(4), rank)",
        "called broadcast from rank 1 of 4 elements of float32",
        "where rank 0 called broadcast from rank 0 of 4 elements of float32",
    ),
    "a send that nobody receives": (
        2,
        "if rank == 0: comm.send(torch.ones(4), 1)",
        "rank 1 returned without receiving what rank 0 sends with tag 0",
    ),
    "circular sends": (
        2,
        "comm.send(torch.ones(4), 1 - rank)",
        "deadlock: rank 0 -> rank 1 -> rank 0 (each waits for the next)",
    ),
    "tags that differ": (
        2,
        "comm.send(torch.ones(4), 1, tag=2) if rank == 0 else comm.recv(torch.ones(4), 0, tag=3)",
        "tag mismatch? rank 1 waits for tag 3 from rank 0, whose unreceived sends to it have tag 2",
    ),
    "a generator as value": (2, "return (i for i in range(3))", "fn returned a generator that cannot travel back"),
    "an exception without words": (
        2,
        "class Mute(Exception):\n    def __str__(self): raise OSError\nraise Mute",
        "raised ",
    ),
    "a launch in a rank": (2, "lab.launch(print, 1)", "ranks cannot launch ranks"),
    "a rank that closes everything": (2, "os.closerange(0, 64); time.sleep(30)", "rank 0 of 2 died"),
    "a signal without a name": (
        1,
        "os.kill(os.getpid(), signal.SIGRTMIN + 5); time.sleep(60)",
        f"rank 0 of 1 died without an exception (signal {signal.SIGRTMIN + 5})",
    ),
    "a segmentation fault": (
        3,
        "if rank == 0:\n    import ctypes\n    ctypes.string_at(0)\ncomm.barrier()",
        "rank 0 of 3 died without an exception (SIGSEGV)",
        "in fn",
        "Fatal Python error: Segmentation fault",
    ),
    "an error while the others compute": (
        2,
        "if rank == 0: raise KeyError('x')\ntime.sleep(60)",
        "rank 0 of 2 raised KeyError: 'x'",
        "rank 1: is not in communication",
        "stopped by the launcher",
    ),
    "errors of all ranks": (2, "raise ValueError(rank)", "raised ValueError: 0", "raised ValueError: 1"),
    "a value that cannot be rebuilt": (
        2,
        "class Value:\n    def __reduce__(self): return int, ('here',)\nreturn Value() if rank else 0",
        "rank 1 of 2 returned a value that cannot be rebuilt here (ValueError: ",
    ),
    "a ring of receives": (
        3,
        "comm.recv(torch.ones(4), (rank - 1) % 3, tag=9); comm.send(torch.ones(4), (rank + 1) % 3, tag=9)",
        "rank 0: waits for recv from rank 2 tag 9 shape (4,)",
        "deadlock: rank 0 -> rank 2 -> rank 1 -> rank 0 (each waits for the next)",
        "rank 2 has no send to rank 0 in flight",
    ),
    "a rank that never joins": (
        3,
        "if rank != 2: comm.all_reduce(torch.ones(2))",
        "all_reduce: rank 2 never joined",
        "rank 2 returned without it",
    ),
    "a rank that makes no group": (
        3,
        "if rank != 2: comm.new_group([0, 1])",
        "rank 0: waits for new_group of ranks [0, 1]",
        "new_group: rank 2 never joined",
    ),
    "groups in other orders": (
        4,
        "for ranks in [(0, 1), (2, 3)] if rank < 2 else [(2, 3), (0, 1)]: comm.new_group(ranks)",
        "rank 0 makes a group of ranks [0, 1] while rank 2 makes one of [2, 3]",
        "every rank must make all groups, its own or not, in one order",
    ),
    "collectives that differ": (
        2,
        "comm.all_reduce(torch.ones(4)) if rank == 0 else comm.all_to_all_single(torch.ones(4), torch.ones(4))",
        "collective mismatch: rank ",
        "all_to_all_single",
    ),
    "plain torch": (
        2,
        "import torch.distributed as dist\n"
        "dist.recv(torch.ones(2), 1) if rank == 0 else dist.all_reduce(torch.ones(2))",
        "rank 0: waits for recv from rank 1 tag 0 shape (2,)",
        "rank 1: waits for all_reduce shape (2,) (plain torch.distributed)",
    ),
    "a rank that is late": (
        2,
        "time.sleep(3.5 * (rank == 0)); comm.all_reduce(torch.ones(2)); return 'no deadlock'",
        "values ['no deadlock', 'no deadlock']",
    ),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    return run_all(
        tmp_path_factory.mktemp("ends"), {name: (ranks, body, 60) for name, (ranks, body, *_) in ENDS.items()}
    )


@pytest.mark.parametrize("name", ENDS)
def test_an_end_is_told(name, ends):
    for words in ENDS[name][2:]:
        assert words in ends[0][name] + "\n"


def test_ends_leave_nothing(ends):
    assert ends[1] == []


WAITS = {
    "sleeping": ("while True: time.sleep(0.01)", "is not in communication"),
    "computing": ("while True: pass", "is not in communication"),
    "a lock": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", "is not in communication"),
    "holding the interpreter": ("import ctypes; ctypes.PyDLL(None).sleep(600)", "holds the interpreter's lock"),
    "stopped": ("os.kill(os.getpid(), 19)", "holds the interpreter's lock"),
}


def test_a_time_limit_says_where_each_rank_was_and_leaves_nothing(tmp_path):
    """Two seconds: after two rounds of questions, when answers once counted as missing."""
    told, left = run_all(
        tmp_path, {name: (2, f"if rank:\n    {body}\ncomm.barrier()", 2) for name, (body, _) in WAITS.items()}
    )
    for name, (_, words) in WAITS.items():
        assert "the time limit of 2 s passed" in told[name], name
        assert "rank 0: waits for barrier" in told[name], name
        assert f"rank 1: {words}" in told[name], name
        assert ("barrier: rank 1 never joined" in told[name]) == (words == "is not in communication"), name
    assert left == []


def test_many_launches_and_failures_grow_nothing(drill):
    body = """
        import psutil
        me = psutil.Process()
        def fine(rank, world_size):
            x = torch.ones(8)
            comm.all_reduce(x)
            return float(x[0])
        def bad(rank, world_size):
            raise ValueError(rank)
        def state():
            return me.num_fds(), threading.active_count(), me.memory_info().rss
        for _ in range(5):
            lab.launch(fine, 2)
        before = state()
        for _ in range(30):
            assert lab.launch(fine, 2) == [2.0, 2.0]
        for _ in range(8):
            try:
                lab.launch(bad, 2)
            except lab.RankError:
                pass
        after = state()
        print("grown", after[0] - before[0], after[1] - before[1], (after[2] - before[2]) // 2**20 < 30)
    """
    assert drill.run(body)[1] == "grown 0 0 True\n"
    assert drill.left() == []


FINE = "print(lab.launch(lambda rank, world_size: rank, 2))"


def test_a_temporary_folder_of_any_name_and_few_descriptors_are_no_obstacle(drill, tmp_path):
    name = "x" * 150 + "/a space, quote'\" and ü " + "y" * 150
    (tmp_path / name).mkdir(parents=True)
    drill.environment["TMPDIR"] = str(tmp_path / name)
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # noqa: E731
    assert drill.run(FINE, preexec_fn=limit)[:2] == (0, "[0, 1]\n")
    assert drill.left() == []


SLEEPERS = """
    def fn(rank, world_size):
        print("up", flush=True)
        time.sleep(600)
    lab.launch(fn, 3, output="live", timeout=900)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nobody_survives_the_caller(number, drill):
    with drill.start(SLEEPERS) as process:
        try:
            assert "up" in process.stdout.readline()
            process.send_signal(number)
            process.communicate(timeout=60)
        finally:
            process.kill()
    deadline = time.monotonic() + 60
    while drill._processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert drill._processes() == []
    assert drill.run(FINE)[:2] == (0, "[0, 1]\n")  # and the next start sweeps what a killed one left
    assert drill.left() == []


def test_a_stopped_and_a_killed_fork_server_do_not_stop_the_next_launch(drill):
    body = """
        import signal
        from multiprocessing import forkserver
        print(lab.launch(lambda rank, world_size: rank, 2))
        pid = forkserver._forkserver._forkserver_pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(2, os.kill, (pid, signal.SIGCONT)).start()
        print(lab.launch(lambda rank, world_size: rank, 2))
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        print(lab.launch(lambda rank, world_size: rank, 2))
    """
    assert drill.run(body)[1] == "[0, 1]\n" * 3
    assert drill.left() == []
