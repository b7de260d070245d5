import json
import xml.etree.ElementTree as ET
from itertools import product

import pytest
from timeline_samples import COSTS, PROGRAMS

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules import gpipe, one_f_one_b
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Message, Span, Timeline


def all_reduce():
    spans = [
        [Span(0, 0, 3_000_000, "compute"), Span(0, 3_000_000, 5_000_000, "collective", label="all_reduce")],
        [
            Span(1, 0, 1_000_000, "compute"),
            Span(1, 1_000_000, 3_000_000, "wait"),
            Span(1, 3_000_000, 5_000_000, "collective", label="all_reduce"),
        ],
    ]
    message = Message(0, 1, 3_000_000, 3_500_000, "all_reduce", num_bytes=64)
    return Timeline("all_reduce", spans, [message], source="virtual", unit="ns")


def test_numbers_of_a_timeline():
    timeline = all_reduce()
    assert timeline.num_ranks == 2
    assert timeline.makespan == 5_000_000
    assert [timeline.busy_time(rank) for rank in (0, 1)] == [5_000_000, 3_000_000]
    assert [timeline.bubble_time(rank) for rank in (0, 1)] == [0, 2_000_000]
    assert timeline.bubble_fraction == 0.2
    assert timeline.window(1) == (0, 5_000_000)
    assert timeline.live_activations(0) == [(0, 0)]
    assert timeline.peak_activations(0) == 0


def test_nested_spans_count_once():
    timeline = Timeline("nested", [[Span(0, 0, 9, "step"), Span(0, 2, 5, "compute"), Span(0, 8, 12, "compute")]])
    assert timeline.busy_time(0) == 12


def test_an_empty_timeline_has_no_time():
    timeline = Timeline("empty", [[], []])
    assert (timeline.makespan, timeline.bubble_fraction, timeline.critical_path()) == (0, 0.0, [])
    assert timeline.window(0) == (0, 0)
    assert "no time passes" in str(timeline)
    ET.fromstring(timeline.to_svg())


def test_weight_gradients_are_due_from_the_end_of_i_to_the_end_of_w():
    split = simulate(Program.parse("split", ["0F0 0F1 0I0 0I1 0F2 0W0 0B2 0W1"]))
    assert split.pending_weight_grads(0) == [(0, 0), (3, 1), (4, 2), (6, 1), (9, 0)]
    assert split.peak_pending_weight_grads(0) == 2
    whole = simulate(one_f_one_b(2, 2))
    assert (whole.pending_weight_grads(1), whole.peak_pending_weight_grads(1)) == ([(0, 0)], 0)
    instant = simulate(Program.parse("instant", ["0F0 0I0 0W0"]), Cost(I=0, W=0))
    assert (instant.pending_weight_grads(0), instant.peak_pending_weight_grads(0)) == ([(0, 0)], 1)


def test_the_local_bubble_leaves_out_both_ends():
    timeline = simulate(one_f_one_b(2, 2))
    assert [timeline.window(rank) for rank in range(2)] == [(0, 9), (1, 7)]
    assert [timeline.bubble_time(rank) for rank in range(2)] == [3, 3]
    assert [timeline.local_bubble(rank) for rank in range(2)] == [3, 0]


def test_an_activation_is_freed_before_the_next_one_is_made():
    timeline = simulate(one_f_one_b(1, 3), Cost(F=0, B=0))
    assert timeline.peak_activations(0) == 1  # although everything happens at time 0
    assert timeline.live_activations(0) == [(0, 0)]


def test_the_critical_path_without_labels_follows_time():
    spans = [[Span(0, 0, 4, "compute")], [Span(1, 0, 1, "compute"), Span(1, 1, 6, "wait"), Span(1, 6, 7, "compute")]]
    timeline = Timeline("measured", spans, [Message(0, 1, 4, 6)], source="measured", unit="ns")
    assert timeline.critical_path() == [spans[0][0], spans[1][2]]


def test_the_dictionary_is_json_and_exact(subtests):
    for program, cost in product(PROGRAMS, COSTS):
        with subtests.test(program=program.name, cost=cost):
            timeline = simulate(program, cost)
            copy = Timeline.from_dict(json.loads(json.dumps(timeline.to_dict())))
            assert copy == timeline
            assert copy.messages == timeline.messages
            assert (copy.name, copy.source, copy.unit) == (timeline.name, timeline.source, timeline.unit)
            assert Timeline.from_dict(all_reduce().to_dict()).messages[0].num_bytes == 64


def test_other_dictionaries_are_refused():
    with pytest.raises(ValueError, match="use Timeline"):
        Timeline.from_dict({"ranks": []})


def test_equality_looks_at_what_happened_only():
    one = simulate(gpipe(2, 3))
    same = Timeline("another run", one.spans_by_rank, reversed(one.messages), source="virtual")
    assert one == same
    assert one != simulate(gpipe(2, 3), Cost(latency=1))
    assert one != simulate(gpipe(2, 3), unit="ns")
    assert one != Timeline(one.name, one.spans_by_rank, one.messages[1:])
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


NUMBER = (int, float)
FIELDS = {  # what the trace event format asks of each phase
    "M": {"name": str, "pid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "dur": NUMBER, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": NUMBER},
    "f": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": NUMBER, "bp": str},
    "C": {"name": str, "pid": int, "ts": NUMBER, "args": dict},
}


def test_perfetto_keeps_to_the_trace_event_format(subtests):
    for program, cost in product(PROGRAMS, COSTS):
        with subtests.test(program=program.name, cost=cost):
            timeline = simulate(program, cost)
            trace = json.loads(timeline.to_perfetto())
            assert trace.keys() == {"traceEvents", "displayTimeUnit"}
            slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
            assert len(slices) == sum(map(len, timeline.spans_by_rank))
            counters = [event["args"] for event in trace["traceEvents"] if event["ph"] == "C"]
            peaks = {
                "activations": max(map(timeline.peak_activations, range(timeline.num_ranks))),
                "due": max(map(timeline.peak_pending_weight_grads, range(timeline.num_ranks))),
            }
            assert all(max(counter.get(name, 0) for counter in counters) == peak for name, peak in peaks.items())
            starts, ends = {}, {}
            for event in trace["traceEvents"]:
                assert all(isinstance(event[field], kind) for field, kind in FIELDS[event["ph"]].items())
                assert 0 <= event["pid"] < timeline.num_ranks
                assert 0 <= event.get("ts", 0) <= event.get("ts", 0) + event.get("dur", 0) <= float(timeline.makespan)
                if event["ph"] in "sf":  # an arrow needs a slice to hang on
                    where, now = event["pid"], event["ts"]
                    assert any(s["pid"] == where and s["ts"] <= now <= s["ts"] + s["dur"] for s in slices)
                    assert (starts if event["ph"] == "s" else ends).setdefault(event["id"], event) is event
                if event["ph"] == "C":
                    assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
            assert starts.keys() == ends.keys() == set(range(len(timeline.messages)))
            for number, start in starts.items():  # both ends of an arrow agree, and it does not point back in time
                end = ends[number]
                assert [start[key] for key in ("cat", "name")] == [end[key] for key in ("cat", "name")]
                assert start["ts"] < end["ts"]
                assert start["pid"] != end["pid"]
    events = json.loads(all_reduce().to_perfetto())["traceEvents"]  # from nanoseconds, in microseconds
    assert [event["dur"] for event in events if event["ph"] == "X"] == [3000, 2000, 1000, 2000, 2000]
