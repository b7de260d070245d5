"""Clocks of many hosts on one axis: offsets within bounds, drift, traces, and messages that no drawing reverses."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

import dualpipe_lab as lab
from dualpipe_lab.launch.cluster.clocks import ClockReading, offset_at, reading_of
from dualpipe_lab.launch.record.trace import RankTrace, Received, Sent, clock_note, match, to_timeline
from dualpipe_lab.timeline import Span

DELAYS = st.integers(0, 5_000_000)


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=8))
def test_the_true_offset_lies_within_the_bound_however_unequal_the_two_ways_are(offset, ways):
    now, exchanges = 1_000, []
    for there, back in ways:
        exchanges.append((now, now + there + offset, now + there + back))
        now += there + back + 10
    found = reading_of(exchanges)
    assert abs(found.offset_ns - offset) <= found.bound_ns
    assert found.bound_ns <= min(there + back for there, back in ways) // 2 + 1


@given(st.integers(-(10**9), 10**9), st.integers(-50_000, 50_000), st.integers(10**6, 10**11), st.data())
def test_between_two_readings_a_steady_drift_is_taken_out(offset, drift_per_second, length, data):
    """The error of every time in between is at most the larger bound, and one nanosecond of rounding."""

    def true(time):
        return offset + drift_per_second * time // 10**9

    errors = [data.draw(st.integers(-20_000, 20_000)) for _ in range(2)]
    first, last = (
        ClockReading(time, true(time) + error, 20_000) for time, error in zip((0, length), errors, strict=True)
    )
    time = data.draw(st.integers(0, length))
    assert abs(offset_at([first, last], time) - true(time)) <= 20_000 + 2


def trace(rank, spans=(), sent=(), received=()):
    made = RankTrace(rank, [Span(rank, *span, "compute") for span in spans])
    made.sent = [Sent(peer, 0, time, None, 8, "") for peer, time in sent]
    made.received = [Received(peer, 0, number, time, 8) for number, (peer, time) in enumerate(received)]
    return made


def test_no_message_is_drawn_before_it_was_sent():
    """Within the bounds it came at once; beyond them the launch says so; one clock is never touched."""
    traces = [trace(0, sent=[(1, 1_000)]), trace(1, received=[(0, 970)])]
    assert match(traces).messages[0][3] == 970
    traces[1].error_ns = 50
    found = match(traces)
    assert (found.messages[0][2:4], found.early_ns) == ((1_000, 1_000), 0)
    traces[1].error_ns = 10
    assert (match(traces).messages[0][3], match(traces).early_ns) == (1_000, 20)


def test_a_drawing_of_several_clocks_states_their_bound():
    traces = [trace(0, spans=[(0, 5)]), trace(1), trace(2)]
    assert clock_note(traces) == ""
    assert to_timeline(traces, [], "wall", "step").name == "step"
    traces[1].error_ns, traces[2].error_ns = 2_000, 3_001
    assert "step, clocks within 6 us: 3 ranks, measured" in str(to_timeline(traces, [], "wall", "step"))


SKEWED = """
import os, sys, time
rank, real = int(os.environ["RANK"]), time.perf_counter_ns
time.perf_counter_ns = lambda: real() + rank * 47_000_000 + rank * (real() // 50_000)  # 20 us more per second
import torch
import dualpipe_lab as lab

def fn(rank, world_size):
    x = torch.zeros(1)
    for _ in range(100):
        if rank:
            lab.comm.recv(x, 0)
            lab.comm.send(x, 0)
        else:
            lab.comm.send(x, 1)
            lab.comm.recv(x, 1)

def steps(rank, world_size):
    with lab.StepTraces("traces") as traces:
        for step in range(3):
            with traces.step(step):
                fn(rank, world_size)
                time.sleep(0.2)

lab.launch(steps, None)
out = lab.launch(fn, None)
early = sum(message.arrived < message.sent for message in out.timeline.messages)
slow = sum(message.arrived - message.sent > 20_000_000 for message in out.timeline.messages)
if rank == 0:
    sys.stdout.write(f"RESULT {len(out.timeline.messages)} {early} {slow} {out.timeline.name}\\n")
"""


def test_ranks_of_torchrun_with_skewed_clocks_draw_on_one_axis(tmp_path):
    """47 ms apart, and drifting: none of 200 messages comes before it was sent, and none seems to take the skew."""
    (tmp_path / "script.py").write_text(SKEWED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=240, check=False,
        env=os.environ, cwd=tmp_path,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), done.stderr)
    assert line.startswith("RESULT 200 0 "), line
    assert int(line.split()[3]) < 20, line  # a busy machine may hold up some messages, the skew would hold up half
    assert ", clocks within " in line
    assert "before it was sent" not in done.stderr
    found = lab.read_traces(tmp_path / "traces")
    readings = [
        line for path in found.path.iterdir() for line in path.read_text().splitlines() if line.startswith('{"clock"')
    ]
    assert len(readings) == 8, "one at the start and one behind each step"
    messages = found.timeline().messages
    assert len(messages) == 600
    assert not [message for message in messages if message.arrived < message.sent]
    assert sum(message.arrived - message.sent > 20_000_000 for message in messages) < 60
    assert match([one for steps in found.by_rank.values() for one in steps.values()]).early_ns == 0
