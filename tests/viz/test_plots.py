"""Timelines by matplotlib: every action is a bar in its place."""

import struct
from collections import Counter

import pytest
from timeline_grid import ORACLES

from dualpipe_lab import Program, Timeline, schedules, simulate
from dualpipe_lab.viz import plot_timelines, timeline_png

pytest.importorskip("matplotlib")


def bars(axes):
    """(rank row, left, right) of every bar of work."""
    paths = [path for collection in axes.collections if collection.get_zorder() == 2 for path in collection.get_paths()]
    return [path.get_extents() for path in paths]


def words(axes):
    """Every text in the cells."""
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_as_many_bars_as_actions_each_in_its_place():
    program = Program.parse("DualPipe", ORACLES["dualpipe 8 ranks 20 microbatches"])
    timeline = simulate(program)
    (axes,) = plot_timelines(timeline).axes
    boxes = bars(axes)
    parts = [(span.rank, span.start, span.end) for row in timeline.spans_by_rank for span in row for _ in span.actions]
    assert sorted((round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in boxes) == sorted(parts)


def test_a_figure_of_two_timelines_saves(tmp_path):
    timeline = simulate(schedules.build("1f1b", num_ranks=3, num_microbatches=4))
    figure = plot_timelines(timeline, timeline)
    assert len(figure.axes) == 2
    figure.savefig(tmp_path / "timeline.pdf")
    assert (tmp_path / "timeline.pdf").stat().st_size > 5000


def test_units_do_not_mix():
    program = schedules.build("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="in one unit"):
        plot_timelines(simulate(program), simulate(program, unit="ns"))


def test_a_rank_s_second_stage_is_written_in_lower_case():
    timeline = simulate(Program.parse("ZBV", ORACLES["zbv 4 ranks 8 microbatches (torch)"]))
    (axes,) = plot_timelines(timeline, width=40).axes
    drawn = Counter(words(axes))
    assert drawn == Counter(f"{(k.lower() if s > 3 else k)}{m}" for s, k, m in program_of(timeline))
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend[:3] == ["F forward", "I backward, input", "W backward, weights"]
    assert legend[-1] == "lower case: the rank's second stage"


def program_of(timeline):
    return [part for row in timeline.spans_by_rank for span in row for part in span.actions]


def test_a_long_run_is_summed_up_and_keeps_its_shares():
    timeline = simulate(schedules.build("1f1b", 8, 500))
    (axes,) = plot_timelines(timeline).axes
    boxes = bars(axes)
    assert len(boxes) < 1000
    assert words(axes) == []
    area = sum(box.width * box.height for box in boxes) / (0.8 * 8 * timeline.makespan)
    assert area == pytest.approx(1 - timeline.bubble_fraction, abs=0.02)


def test_a_png_has_the_width_that_was_asked_for(tmp_path):
    timeline = simulate(schedules.build("gpipe", 4, 8))
    picture = timeline_png(timeline, tmp_path / "timeline.png", width=900)
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">I", picture[16:20]) == (900,)
    assert (tmp_path / "timeline.png").read_bytes() == picture == timeline_png(timeline, width=900)


def test_nothing_to_draw_is_no_error():
    assert timeline_png(Timeline("empty", [[], []])).startswith(b"\x89PNG")
