"""Streams, colours and memory bands: the page's layout is Python's data, and both pictures show the same."""

import json
import xml.etree.ElementTree as ET

import pytest

from dualpipe_lab import Cost, Timeline, schedules, simulate
from dualpipe_lab.ep import overlap
from dualpipe_lab.timeline import Message, Span
from dualpipe_lab.timeline.colours import Colouring, colour_named
from dualpipe_lab.timeline.svg import stream_lines
from dualpipe_lab.viz import compare
from dualpipe_lab.viz.embed import timeline_spec, track_spec

WAYS = ("kind", "direction", "stage", "microbatch")


def pair():
    """Two streams, as DeepSeek-V3 runs a forward and a backward side by side."""
    return overlap.simulate(overlap.one_f_one_b_overlap(3), overlap.ticks_of(2, 3)).timeline("pair")


def recorded():
    """A run: collectives on a stream beside the work, a wait, and messages of which several are under way at once."""
    rows = [
        [Span(0, 0, 4, "F"), Span(0, 4, 9, "collective"), Span(0, 9, 12, "B")],
        [Span(1, 1, 5, "F"), Span(1, 8, 12, "B")],
    ]
    sent = [Message(0, 1, 1, 7, "0F1"), Message(0, 1, 2, 5, "x", left=3), Message(1, 0, 5, 5), Message(0, 1, 7, 8)]
    run = Timeline("run", rows, sent, source="measured")
    return run.with_stream("communication", [[Span(0, 2, 9, "collective", label="sum")], []])


LINES = """specs => specs.map((spec) => {
  const track = makeTrack(spec), bar = (id) => [startOf(track, id), endOf(track, id)];
  return lanesOf(track).map(({ name, ranks }) => [name, ranks.map((lines) => lines.map((line) => line.map(bar)))]);
})"""


@pytest.mark.browser
def test_the_page_lays_out_the_same_lines_as_python(modules):
    slow = simulate(schedules.build("interleaved", 4, 8), Cost(F=2, I=3, W=1, latency=4, transfer=3))
    found = [pair(), recorded(), slow, Timeline.from_dict({**slow.to_dict(), "costs": None})]
    there = modules("lanes", "track").evaluate(LINES, [track_spec(timeline) for timeline in found])
    for timeline, page in zip(found, there, strict=True):
        ranks = stream_lines(timeline, with_messages=True)
        assert page == [
            [name, [[[[bar.start, bar.end] for bar in line] for line in rank[name]] for rank in ranks]]
            for name in ranks[0]
        ], timeline.name


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
        ({"color": "stage"}, "a timeline has no option 'color'; known are time, look, selection, colour_by"),
        ({"colour_by": "rank"}, "cells are coloured by kind, direction, stage, microbatch, got 'rank'"),
        ({"memory": "some"}, "memory bands are of none, rank, all, got 'some'"),
    ],
)
def test_an_unknown_option_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        compare(pair(), **options).to_html()
    assert timeline_spec([pair()], {"colour_by": "stage", "memory": "all"})["memory"] == "all"
