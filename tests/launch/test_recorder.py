"""A rank's recorder: ledger and trace are written when somebody asks, and nothing is lost."""

import pickle
import threading

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.clock import VirtualClock
from dualpipe_lab.launch.context import RankContext, rank_context
from dualpipe_lab.launch.record import trace
from dualpipe_lab.launch.record.operation import Moved, Operation
from dualpipe_lab.launch.record.recorder import MAX_BUFFERED, Recorder
from dualpipe_lab.launch.record.traffic import Traffic


def message(sends, tag=3):
    moved = Moved(Traffic(8, 0, 1) if sends else Traffic(0, 8, 1))
    name = "isend" if sends else "irecv"
    return Operation(name, (0, 1), (1,), peer=1, tag=tag, sends=sends, tensor_bytes=8, derive=lambda _: moved)


def recorder_of(rank):
    return Recorder(rank, VirtualClock())


def test_a_ledger_in_hand_is_complete_whenever_it_is_read():
    recorder = recorder_of(0)
    entries = recorder.ledger.entries  # what a caller may have in hand before
    assert "isend" not in entries
    recorder.before(message(sends=True))
    assert pickle.loads(pickle.dumps(recorder.ledger)).entries["isend"].sent == 8
    recorder.before(message(sends=True))
    assert entries["isend"].sent == 16
    assert recorder.status.sent == {(1, 3): 2}
    assert [event.peer for event in recorder.trace.sent] == [1, 1]


def test_what_is_kept_is_entered_when_somebody_asks():
    recorder, receive = recorder_of(0), message(sends=False)
    recorder.before(receive)
    recorder.clock.wait_until(70)
    recorder.after(receive, waited_from=20)
    assert not recorder.status.received
    assert not recorder.trace.spans
    recorder.flush()
    assert recorder.ledger.entries["irecv"].received == 8
    assert recorder.status.received == {(1, 3): 1}
    assert [event.time_ns for event in recorder.trace.received] == [70]
    assert [(span.start, span.end, span.kind) for span in recorder.trace.spans] == [(20, 70, "wait")]


def test_the_ledger_of_a_script_s_own_process_group_says_that_it_stays_empty():
    with pytest.warns(UserWarning, match="this script made its process group itself, so comm records nothing; run"):
        assert not RankContext(0, 1, VirtualClock(), records=False).ledger.entries


def test_what_is_kept_does_not_pile_up():
    recorder = recorder_of(0)
    for tag in range(3 * MAX_BUFFERED):
        recorder.before(message(sends=True, tag=tag))
    assert recorder.ledger.found["isend"].count > 2 * MAX_BUFFERED
    assert recorder.ledger.entries["isend"].count == 3 * MAX_BUFFERED


def test_whoever_writes_each_message_is_written_once():
    recorder, over = recorder_of(0), threading.Event()

    def ask():
        while not over.is_set():
            recorder.flush()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for tag in range(5_000):
        recorder.before(message(sends=True, tag=tag))
    over.set()
    for thread in threads:
        thread.join()
    assert recorder.ledger.entries["isend"].count == 5_000
    assert len(recorder.trace.sent) == 5_000


def _step(rank, num_ranks):
    """What the last stage's loss sees in the middle of the step, and what a caller sees after it."""
    recorder, seen, asked = rank_context().recorder, [], []
    entries, flush = rank_context().ledger.entries, recorder.flush

    def counting_flush():
        if threading.current_thread() is threading.main_thread():  # on another one the launcher asks a slow rank
            asked.append(len(seen))
        return flush()

    def loss(y, target):
        seen.append((len(asked), rank_context().ledger.entries["irecv"].count))
        return (y - target).square().mean()

    runtime = lab.PipelineRuntime(
        lab.schedules.gpipe(num_ranks, 3), {rank: torch.nn.Linear(2, 2)}, loss, torch.zeros(1, 2), lookahead=1
    )
    batch = [torch.ones(1, 2)] * 3
    recorder.flush = counting_flush
    runtime.step(batch, batch)
    comm.barrier()
    return seen, {name: entry.count for name, entry in entries.items()}, len(rank_context().status().sent)


def test_a_step_is_in_the_books_when_it_is_over_and_for_those_who_ask_within():
    first, last = lab.launch(_step, 2, output="collect")
    assert [count for _, count in last[0]] == [1, 2, 3]
    assert [num_asked for num_asked, _ in last[0]] == [0, 1, 2]  # the step enters nothing until somebody asks
    for _, counts, num_sent in (first, last):
        assert counts == {"isend": 3, "irecv": 3, "barrier": 1}
        assert num_sent == 3


def test_receives_that_were_not_recorded_are_not_lost(monkeypatch, recwarn):
    def fn(rank, world_size):
        trace.MAX_EVENTS = 4  # in this rank's process
        for _ in range(3):  # rank 0 receives more than it records, and the others send less
            for sender in (1, 2):
                if rank == 0:
                    comm.recv(torch.ones(1), sender)
                if rank == sender:
                    comm.send(torch.ones(1), 0)

    monkeypatch.setattr(trace, "MAX_EVENTS", 4)
    assert len(lab.launch(fn, 3, output="collect").timeline.messages) == 4
    assert not [warning for warning in recwarn if "never received" in str(warning.message)]
