"""Traces in files: windows of steps, what a killed rank leaves, missing files, clocks that drift, one timeline."""

import json
import os
import signal

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.launch.record import trace
from dualpipe_lab.launch.record.step_traces import FORMAT, pack_step
from dualpipe_lab.launch.record.trace import RankTrace, Received, Sent
from dualpipe_lab.timeline import Span


def passes_on(step):
    """One step: rank 0 sends to rank 1, which sends to rank 2; then all of them sum."""
    rank, x = comm.get_rank(), torch.ones(step + 1)
    if rank:
        comm.recv(x, rank - 1)
    with lab.span("compute", label=f"step {step}"):
        x += 1
    if rank < 2:
        comm.send(x, rank + 1)
    comm.all_reduce(x)


def trains(rank, world_size, folder, steps, **window):
    with lab.StepTraces(folder, **window) as traces:
        for step in range(steps):
            with traces.step(step):
                passes_on(step)
        return len(rank_context().trace.spans)


def launch(fn, *args, **options):
    return lab.launch(fn, 3, *args, output="collect", **options)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_steps_asked_for_are_in_the_files_and_nothing_else_is_kept(tmp_path):
    kept = launch(lambda rank, world_size: trains(rank, world_size, tmp_path, 9, every=4))
    assert max(kept) < 6, "the last step alone is in the memory"
    found = lab.read_traces(tmp_path)
    last = kept.timeline.between(min(span.start for spans in kept.timeline.spans_by_rank for span in spans), 10**18)
    assert found.timeline([8]).messages == last.messages, "as the launch itself returns them"
    assert found.steps == [0, 4, 8]
    assert (found.world_size, found.missing) == (3, ())
    one = found.timeline([4])
    assert [message[:2] for message in one.messages] == [(0, 1), (1, 2)]
    assert {message.num_bytes for message in one.messages} == {20}
    assert one.streams == ("work", "communication")
    labels = [{span.label for span in spans if span.kind == "compute"} for spans in one.spans_by_rank]
    assert labels == [{"step 4"}] * 3
    assert min(span.start for spans in one.spans_by_rank for span in spans) == 0
    assert len(found.timeline().messages) == 6


def test_a_killed_rank_leaves_its_steps_and_half_a_line_is_not_read(tmp_path):
    def fn(rank, world_size):
        with lab.StepTraces(tmp_path) as traces:
            for step in range(100):
                with traces.step(step):
                    passes_on(step)
                    if (rank, step) == (1, 3):
                        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(lab.RankError, match="SIGKILL"):
        launch(fn)
    victim = tmp_path / "run-0000" / "rank-00001.jsonl"
    assert lines_of(victim)[-1].keys() == {"clock"}, "what a rank has recorded is in its file at once"
    victim.write_text(victim.read_text() + '{"step":3,"spans":[[12')
    found = lab.read_traces(tmp_path)
    assert found.steps[:3] == [0, 1, 2]
    assert max(found.by_rank[1]) == 2
    assert len(found.timeline([0, 1, 2]).messages) == 6


def test_the_last_run_is_read_and_messages_with_one_recorded_end_are_left_out(tmp_path):
    for steps in (1, 3):
        launch(trains, tmp_path, steps)
    path = tmp_path / "run-0001" / "rank-00002.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"step":1' not in line))
    found = lab.read_traces(tmp_path)
    assert found.steps == [0, 1, 2]
    received = [message.num_bytes for message in found.timeline().messages if message.dst == 2]
    assert received == [4, 12], "later messages keep their numbers"
    path.unlink()
    found = lab.read_traces(tmp_path)
    assert lab.read_traces(tmp_path / "run-0000").steps == [0]
    assert found.missing == (2,)
    assert {message[:2] for message in found.timeline().messages} == {(0, 1)}
    assert found.timeline().num_ranks == 3


def test_more_events_than_are_kept_leave_the_numbers_of_later_ones(tmp_path, monkeypatch):
    def fn(rank, world_size):
        trace.MAX_EVENTS = 3  # in this rank's process
        with lab.StepTraces(tmp_path) as traces:
            for step in range(2):
                with traces.step(step):
                    for number in range(5):
                        passes_on(number)

    monkeypatch.setattr(trace, "MAX_EVENTS", 3)
    launch(fn)
    found = lab.read_traces(tmp_path)
    messages = found.timeline().messages
    assert {message.num_bytes for message in messages} == {4, 8, 12}
    assert len(messages) == 2 * 2 * 3, "of either end as many are kept"


def written(folder, rank, readings, steps, world_size=2):
    """A file as a rank on another host would write it."""
    path = folder / f"rank-{rank:05d}.jsonl"
    head = {"format": FORMAT, "rank": rank, "world_size": world_size, "host": f"host{rank}", "pid": 1}
    lines = [head, *({"clock": reading} for reading in readings), *(pack_step(*step) for step in steps)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_drift_is_taken_out_between_two_readings_and_the_bound_is_told(tmp_path):
    """Rank 1's clock loses 1 us per ms in the first window and nothing in the second."""
    first, second = RankTrace(0), RankTrace(0)
    first.sent, second.sent = [Sent(1, 0, 500_000, None, 8, "")], [Sent(1, 0, 1_600_000, None, 8, "")]
    second.forgotten[1, 0] = 1
    here, there = RankTrace(1), RankTrace(1)
    here.received, there.received = [Received(0, 0, 0, 499_700, 8)], [Received(0, 0, 1, 1_599_300, 8)]
    here.spans, there.spans = [Span(1, 0, 1_000_000, "compute")], [Span(1, 1_500_000, 1_700_000, "compute")]
    written(tmp_path, 0, [[0, 0, 0]], [(0, first), (1, second)])
    written(tmp_path, 1, [[0, 0, 90], [1_000_000, 1_000, 110], [2_000_000, 1_000, 80]], [(0, here), (1, there)])
    found = lab.read_traces(tmp_path)
    assert [(m.sent, m.arrived) for m in found.timeline().messages] == [(500_000, 500_200), (1_600_000, 1_600_300)]
    assert found.by_rank[1][0].spans[0].end == 1_001_000
    assert ", clocks within 1 us" in found.timeline().name


def test_what_cannot_be_read_or_recorded_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"has no trace files, run-0000/rank-00000\.jsonl; name the folder"):
        lab.read_traces(tmp_path)
    written(tmp_path, 0, [], [(0, RankTrace(0))])
    with pytest.raises(ValueError, match="has no step 7; it has step 0"):
        lab.read_traces(tmp_path).timeline([7])
    written(tmp_path, 1, [], [], world_size=3)
    with pytest.raises(ValueError, match=r"files of worlds of \[2, 3\] ranks; put the files of one run"):
        lab.read_traces(tmp_path)
    (tmp_path / "rank-00001.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="does not begin with the format"):
        lab.read_traces(tmp_path)

    def fn(rank, world_size):
        return lab.StepTraces(tmp_path, every=0)

    with pytest.raises(lab.RankError, match="got every=0; use 1 or more"):
        lab.launch(fn, 1, output="collect")
