"""Timelines by matplotlib: every action is a bar in its place."""

import pytest
from timeline_grid import ORACLES

from dualpipe_lab import Cost, Program, schedules, simulate
from dualpipe_lab.viz import plot_timelines

pytest.importorskip("matplotlib")


def bars(axes):
    """(rank row, left, right) of every bar of work."""
    paths = [path for collection in axes.collections if collection.get_zorder() == 2 for path in collection.get_paths()]
    return [path.get_extents() for path in paths]


def test_as_many_bars_as_actions_each_in_its_place():
    program = Program.parse("DualPipe", ORACLES["dualpipe 8 ranks 20 microbatches"])
    timeline = simulate(program)
    (axes,) = plot_timelines(timeline).axes
    boxes = bars(axes)
    parts = [(span.rank, span.start, span.end) for row in timeline.spans_by_rank for span in row for _ in span.parts]
    assert sorted((round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in boxes) == sorted(parts)


def test_messages_become_arrows_and_the_figure_saves(tmp_path):
    timeline = simulate(schedules.build("1f1b", num_ranks=3, num_microbatches=4), Cost(latency=1))
    figure = plot_timelines(timeline, timeline, messages=True)
    assert [len(axes.texts) >= len(timeline.messages) for axes in figure.axes] == [True, True]
    figure.savefig(tmp_path / "timeline.pdf")
    assert (tmp_path / "timeline.pdf").stat().st_size > 5000


def test_units_do_not_mix():
    program = schedules.build("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="in one unit"):
        plot_timelines(simulate(program), simulate(program, unit="ns"))
