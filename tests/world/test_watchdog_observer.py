"""The observer of the watchdog, on made-up beats and records: no process, no store, no clock."""

from collections import Counter
from dataclasses import replace

import pytest
import torch.distributed as dist

from dualpipe_lab.world.cluster.observer import SILENT_SECONDS, STOPPED, Observer, Records, is_deadlock
from dualpipe_lab.world.cluster.processes import OpenPort, answering, user_part
from dualpipe_lab.world.cluster.status_store import Beat, Death, Member, Report, StatusStore, Verdict
from dualpipe_lab.world.record.operation import Communicator
from dualpipe_lab.world.record.rank_status import Blocked, RankStatus, StackFrame
from dualpipe_lab.world.supervise.errors import RankFailure


def status(rank, blocked=None, **fields):
    plain = RankStatus(rank, blocked, False, 1.0, 4, 0.5, Counter(), Counter(), {}, {}, [StackFrame("step.py", 3, "f")])
    return replace(plain, **fields)


def receives(peer, tag=0):
    return Blocked("recv", f"recv from rank {peer} tag {tag}", False, peer, tag)


def member(rank, node, address="10.99.0.1"):
    return Member(rank, rank % 2, node, f"host{node}", address, 1, "space", 100 + rank, "/nowhere")


def watching(beats, timeout=None):
    observer = Observer(timeout, 0.0)
    observer.see(0.0, beats)
    return observer


def test_beats_survive_their_seven_bytes():
    beat = Beat(70_000, 300, True, False)
    assert len(beat.pack()) == 7
    assert Beat(70_000, 255, True, False).pack() == beat.pack()  # 255 still beats are as good as more


def test_all_that_run_must_stand_still():
    still, moving, returned = Beat(5, 2), Beat(5, 0), Beat(5, 0, returned=True)
    assert watching({0: still, 1: still}).seems_stuck(0.1)
    assert watching({0: still, 1: returned}).seems_stuck(0.1)
    assert not watching({0: still, 1: moving}).seems_stuck(0.1)
    assert not watching({0: Beat(5, 1), 1: still}).seems_stuck(0.1)
    assert not watching({0: returned, 1: returned}).seems_stuck(0.1)


def test_a_silent_rank_is_not_said_to_stand_still():
    observer = watching({0: Beat(5, 2), 1: Beat(5, 2)})
    observer.see(2.0, {0: Beat(8, 5), 1: Beat(5, 2)})
    assert not observer.seems_stuck(2.0)
    observer.see(2.1, {1: Beat(6, 3)})
    assert observer.seems_stuck(2.1)


def test_silence_counts_from_the_last_change_and_not_for_those_who_left():
    observer = watching({0: Beat(1), 1: Beat(1), 2: Beat(1, left=True)})
    later = SILENT_SECONDS + 0.1
    observer.see(later, {0: Beat(2), 1: Beat(1), 2: Beat(1, left=True)})
    assert observer.silent(later) == [1]
    assert observer.left() == {2}


@pytest.mark.parametrize(("timeout", "now", "late"), [(None, 1e9, False), (5.0, 4.9, False), (5.0, 5.1, True)])
def test_the_time_limit_is_that_of_functions_that_run(timeout, now, late):
    assert watching({0: Beat(1), 1: Beat(1, returned=True)}, timeout).is_late(now) is late
    assert not watching({0: Beat(1, returned=True)}, timeout).is_late(now)


def test_a_silence_is_counted_from_the_last_beat_that_was_seen():
    observer = watching({0: Beat(1), 1: Beat(1)})
    observer.see(1.4, {0: Beat(2), 1: Beat(1)})
    assert (observer.silence(3.5, 0), observer.silence(3.5, 1)) == (pytest.approx(2.1), pytest.approx(3.5))
    assert observer.silence(3.5, 2) == 0.0


def test_a_ring_of_receives_is_a_deadlock_and_a_message_under_way_is_not():
    ring = {0: status(0, receives(1, 7)), 1: status(1, receives(0, 7))}
    assert is_deadlock(ring, {})
    ring[0] = status(0, receives(1, 7), sent=Counter({(1, 7): 3}))
    assert not is_deadlock(ring, {})
    assert not is_deadlock({1: ring[1]}, {0: ring[0]})  # a rank may return before its message has arrived
    ring[1] = status(1, receives(0, 7), received=Counter({(0, 7): 3}))
    assert is_deadlock(ring, {})


def test_a_collective_that_all_have_reached_is_slow():
    both = Blocked("all_reduce", "all_reduce", communicator=Communicator((0, 1)), sequence=4)
    assert not is_deadlock({0: status(0, both), 1: status(1, both)}, {})
    assert is_deadlock({0: status(0, both), 1: status(1, receives(0))}, {})


def test_a_node_that_vanished_is_named_with_its_ranks(tmp_path):
    members = [member(rank, rank // 2, f"10.99.0.{1 + rank // 2}") for rank in range(4)]
    records = Records(4, reports={0: Report(status(0), b"")}, gone={rank: members[rank] for rank in (2, 3)})
    error = records.error(tmp_path, members, {2: 2.1, 3: 2.1})
    assert str(error).splitlines()[0] == (
        "rank 2 of 4 was lost with node 1 (host host1, ranks 2, 3): no heartbeat for 2.1 s, "
        "and nothing answers at 10.99.0.2"
    )
    assert list(error.failures) == [2, 3]
    assert "rank 0: is not in communication, after 4 operations; at step.py, line 3, in f" in str(error)


def test_one_silent_process_of_a_node_is_not_the_node(tmp_path):
    members = [member(rank, 0) for rank in range(2)]
    text = str(Records(2, gone={1: members[1]}).error(tmp_path, members, {1: 2.1}))
    assert text.startswith("rank 1 of 2 died without an exception (its process is gone): no heartbeat for 2.1 s")


def test_who_raised_comes_before_who_lost_its_peer(tmp_path):
    failures = {0: RankFailure(0, "lost its peer", secondary=True), 2: RankFailure(2, "raised KeyError: 1")}
    records = Records(3, failures=failures)
    assert records.has_cause
    assert not replace(records, failures={0: failures[0]}).has_cause
    assert str(records.error(tmp_path, [], {})).splitlines() == [
        "rank 2 of 3 raised KeyError: 1", "  rank 0: lost its peer",
    ]  # fmt: skip


@pytest.mark.parametrize(("code", "said"), [(-9, "SIGKILL"), (3, "exit code 3"), (None, "its process is gone")])
def test_a_death_is_told_by_its_exit_code(code, said, tmp_path):
    text = str(Records(2, deaths={1: Death(code, "", b"")}).error(tmp_path, [], {}))
    assert text == f"rank 1 of 2 died without an exception ({said})"


def test_a_crash_shows_the_line_from_the_stack(tmp_path):
    stack = 'Fatal Python error: Segmentation fault\nCurrent thread 0x1:\n  File "/home/me/step.py", line 12 in forward'
    error = Records(1, deaths={0: Death(-11, stack, b"")}).error(tmp_path, [], {})
    assert "at step.py, line 12, in forward" in str(error)
    assert error.failures[0].traceback == stack


def test_the_time_limit_tells_stopped_held_and_returned_apart(tmp_path):
    stack = 'Thread 0x1 (most recent call first):\n  File "/home/me/step.py", line 7 in busy'
    records = Records(4, returned={3}, reports={0: Report(status(0), b"")}, stacks={1: stack, 2: STOPPED})
    lines = str(records.timeout(tmp_path, "headline", 5.0)).splitlines()
    assert lines[1:] == [
        "  rank 0: is not in communication, after 4 operations; at step.py, line 3, in f",
        "  rank 1: holds the interpreter's lock, so it cannot answer; at step.py, line 7, in busy",
        "  rank 2: was stopped by a signal (SIGSTOP), so it cannot answer",
        "  rank 3: returned",
    ]


def test_the_user_s_part_of_a_dump_ends_where_the_launch_begins():
    from dualpipe_lab.world import torchrun

    main = (
        f'  File "/me/a.py", line 5 in f\n  File "{torchrun.__file__}", line 80 in _called\n  File "b.py", line 1 in g'
    )
    dump = f'Fatal Python error: Aborted\n\nThread 0x2:\n  File "x.py", line 1 in y\n\nThread 0x1:\n{main}\n'
    assert user_part(dump) == 'Fatal Python error: Aborted\nThread 0x1:\n  File "/me/a.py", line 5 in f'
    assert user_part("") == ""


def test_a_kernel_answers_for_a_process_that_accepts_nothing():
    port = OpenPort("127.0.0.1")
    here = replace(member(0, 0, "127.0.0.1"), port=port.port)
    closed = OpenPort("127.0.0.1")
    gone = replace(member(1, 0, "127.0.0.1"), port=closed.port)
    closed.close()
    assert answering([here, gone], 1.0) == {0}
    port.close()
    assert answering([here, gone], 1.0) == set()


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_records_come_back_by_rank_and_only_those_that_were_posted(store):
    ranks = [StatusStore.for_next_launch(store, rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.arrive(member(rank.rank, 0 if rank.rank < 2 else 1))
    assert ranks[0].wait_for_go(1.0) == []
    assert ranks[1].firsts() == [0, 2]
    assert [other.rank for other in ranks[1].neighbours(member(1, 0))] == [0]
    ranks[2].beat(Beat(9, 1, True))
    assert ranks[0].beats([0, 2]) == {0: Beat(), 2: Beat(9, 1, True)}
    assert ranks[0].posted("death") == {}
    ranks[1].post("death", Death(-9, "", b""), 2)
    assert ranks[0].posted("death") == {2: Death(-9, "", b"")}


def test_ranks_that_do_not_come_are_named(store):
    first = StatusStore.for_next_launch(store, 0, 3)
    first.arrive(member(0, 0))
    assert first.wait_for_go(0.1) == [1, 2]


def test_all_are_woken_when_the_last_returns_and_again_by_an_alarm(store):
    ranks = [StatusStore.for_next_launch(store, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.return_()
    assert [rank.wait_for_wake(0) for rank in ranks] == ["returned", "returned"]
    ranks[1].alarm()
    assert ranks[0].wait_for_wake(1) == "alarm"


def test_the_first_verdict_counts_and_no_launch_follows_it(store):
    ranks = [StatusStore.for_next_launch(store, rank, 2) for rank in range(2)]
    verdicts = [Verdict(text, text, (0,), (0, 1), ()) for text in (b"one", b"two")]
    for rank, verdict in zip(ranks, verdicts, strict=True):
        rank.propose(verdict)
    assert ranks[1].wait_for_verdict() == verdicts[0]
    with pytest.raises(RuntimeError, match=r"an earlier launch of these ranks has failed.*start all ranks again"):
        StatusStore.for_next_launch(store, 0, 2)
