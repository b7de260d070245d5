"""Streams, colours and memory bands: the page's layout is Python's data, and both pictures show the same."""

import json
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from timeline_grid import ORACLES, numbers, same

from dualpipe_lab import Cost, Program, Timeline, schedules, simulate
from dualpipe_lab.ep import overlap
from dualpipe_lab.timeline import Message, Span
from dualpipe_lab.timeline.colours import Colouring, colour_named
from dualpipe_lab.timeline.svg import stream_lines
from dualpipe_lab.viz import compare
from dualpipe_lab.viz.embed import timeline_spec, track_spec

WAYS = ("kind", "direction", "stage", "microbatch")
DUALPIPE = Program.parse("DualPipe", ORACLES["dualpipe 8 ranks 20 microbatches"])


def pair(layers=3, compute=2, comm=3, build=overlap.one_f_one_b_overlap):
    """Two streams, as DeepSeek-V3 runs a forward and a backward side by side."""
    return overlap.simulate(build(layers), overlap.ticks_of(compute, comm)).timeline("pair")


def recorded():
    """A run: collectives on a stream beside the work, a wait, and messages of which several are under way at once."""
    rows = [
        [Span(0, 0, 4, "F"), Span(0, 4, 9, "collective"), Span(0, 9, 12, "B")],
        [Span(1, 1, 5, "F"), Span(1, 8, 12, "B")],
    ]
    sent = [Message(0, 1, 1, 7, "0F1"), Message(0, 1, 2, 5, "x", left=3), Message(1, 0, 5, 5), Message(0, 1, 7, 8)]
    run = Timeline("run", rows, sent, source="measured")
    return run.with_stream("communication", [[Span(0, 2, 9, "collective", label="sum")], []])


def timelines():
    yield from (pair(), pair(1, 1, 5), pair(4, 3, 1, overlap.one_f_one_b_basic), recorded())
    for program in (DUALPIPE, schedules.build("interleaved", 4, 8), schedules.build("zero_bubble_h1", 4, 6)):
        yield simulate(program, Cost(F=2, I=3, W=1, latency=4, transfer=3))
        yield Timeline.from_dict({**simulate(program, Cost(latency=2)).to_dict(), "costs": None})


@pytest.fixture(scope="module")
def both(node):
    """Each timeline beside what the page draws of it; an activation of stage s counts s + 1 bytes."""
    found = list(timelines())
    stages = [1 + max((a[0] for row in t.spans_by_rank for s in row for a in s.actions), default=0) for t in found]
    specs = [track_spec(t) | {"activation_bytes": list(range(1, n + 1))} for t, n in zip(found, stages, strict=True)]
    return list(zip(found, node(specs, "streams.mjs"), strict=True))


def test_the_page_lays_out_the_same_lines_as_python(both):
    for timeline, page in both:
        ranks = stream_lines(timeline, with_messages=True)
        expected = [
            [name, [[[[bar.start, bar.end] for bar in line] for line in rank[name]] for rank in ranks]]
            for name in ranks[0]
        ]
        assert page["lanes"] == expected, timeline.name


def test_no_bar_covers_another(both):
    for _, page in both:
        assert page["places"]
        rows = {}
        for y, height, start, end in page["places"]:
            rows.setdefault((y, height), []).append((start, end))
            assert y + height <= page["rows"]
        tops = sorted(rows)
        assert all(upper[0] + upper[1] <= lower[0] for upper, lower in pairwise(tops))
        for bars in rows.values():
            assert all(one[1] <= other[0] for one, other in pairwise(sorted(bars)))


def test_both_pictures_have_the_same_colours(both):
    for timeline, page in both:
        ranks = stream_lines(timeline, with_messages=True)
        bars = [bar for name in ranks[0] for rank in ranks for line in rank[name] for bar in line]
        work = [span for rank in range(timeline.num_ranks) for span in timeline.stream(rank)]
        for by, (parts, lanes) in zip(WAYS, page["colours"], strict=True):
            colouring = Colouring(timeline, by)
            assert lanes == [colour_named(colouring.of_span(bar)).fill for bar in bars], (timeline.name, by)
            actions = [action for span in work for action in span.actions]
            assert parts == [colour_named(colouring.of_action(action)).fill for action in actions], (timeline.name, by)


def test_a_band_in_bytes_weighs_each_activation(both):
    for timeline, page in both:
        for rank, held in enumerate(page["held"]):
            spans = timeline.stream(rank)
            open_at = {0: sum(a[0] + 1 for a in _begun_before(spans))}
            for span in spans:
                for stage, kind, _ in span.actions:
                    time, change = (span.start, 1) if kind == "F" else (span.end, -1) if kind in "BW" else (0, 0)
                    open_at[time] = open_at.get(time, 0) + change * (stage + 1)
            total, expected = 0, []
            for time in sorted(open_at):
                total += open_at[time]
                expected.append([time, total])
            changes = [e for i, e in enumerate(expected) if i == 0 or e[1] != expected[i - 1][1]]
            assert [e for i, e in enumerate(held) if i == 0 or e[1] != held[i - 1][1]] == changes


def _begun_before(spans):
    """The activations that a stretch of a run frees without having made them."""
    begun = [(a[0], a[2]) for s in spans for a in s.actions if a[1] == "F"]
    freed = [(a[0], a[2]) for s in spans for a in s.actions if a[1] in "BW"]
    return [key for key in freed if key not in begun]


def test_streams_have_a_path_and_busy_times_of_their_work(node):
    found = [pair(), pair(1, 1, 5), pair(4, 3, 1, overlap.one_f_one_b_basic), recorded()]
    for timeline, page in zip(found, node([track_spec(timeline) for timeline in found]), strict=True):
        ours, theirs = numbers(timeline), same(page)
        for key in ("makespan", "busy", "peak", "live", "messages"):
            assert ours[key] == theirs[key]
        spans = [tuple(span[:3]) for span in theirs["spans"]]
        path = [(span.rank, span.start, span.end) for span in timeline.critical_path()]
        assert [spans[i] for i in theirs["path"]] == path
    serial = pair(2, 1, 1, overlap.one_f_one_b_basic)
    assert {span.stream for span in serial.critical_path()} == {"work", "communication"}
    assert sum(span.duration for span in serial.critical_path()) == serial.makespan


def test_a_run_keeps_its_streams_in_every_form():
    timeline = recorded()
    assert timeline.streams == ("work", "communication")
    assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline
    assert [timeline.busy_time(0), timeline.bubble_time(0)] == [7, 5]  # the wait for the sum is idle time
    assert "  communication" in timeline.to_text()
    events = json.loads(timeline.to_perfetto())["traceEvents"]
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == {(0, 0), (0, 1), (1, 0)}


@pytest.mark.parametrize("by", WAYS)
def test_the_static_picture_has_lanes_and_colours(by):
    timeline = simulate(schedules.build("dualpipe", 4, 8), Cost(latency=2))
    root = ET.fromstring(timeline.to_svg(colour_by=by, messages=True))
    fills = [node.get("fill") for node in root.iter("{http://www.w3.org/2000/svg}path")]
    colouring = Colouring(timeline, by)
    names = {colouring.of_action(a) for row in timeline.spans_by_rank for s in row for a in s.actions}
    assert {colour_named(name).fill for name in names} <= set(fills)
    texts = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("comm.") == 4
    assert "0F0" in texts
    assert ("direction 1 (bar on top)" in texts) == (by == "direction")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"color": "stage"}, "a timeline has no option 'color'; known are time, selection, colour_by"),
        ({"colour_by": "rank"}, "cells are coloured by kind, direction, stage, microbatch, got 'rank'"),
        ({"memory": "some"}, "memory bands are of none, rank, all, got 'some'"),
    ],
)
def test_an_unknown_option_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        compare(pair(), **options).to_html()
    assert timeline_spec([pair()], {"colour_by": "stage", "memory": "all"})["memory"] == "all"
