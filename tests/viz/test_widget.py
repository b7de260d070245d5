"""The widget's Python half: what it sends, what it refuses, and what stays when no kernel answers."""

import pytest

from dualpipe_lab import schedules, simulate

pytest.importorskip("anywidget")
traitlets = pytest.importorskip("traitlets")


def timeline(name="1f1b"):
    return simulate(schedules.build(name, num_ranks=2, num_microbatches=3))


def test_a_timeline_gives_its_widget():
    widget = timeline().widget(time=3, selection="1F0")
    assert (widget.time, widget.selection, widget.costs, widget.playing) == (3, "1F0", {}, False)
    assert widget.spec["tracks"][0]["rows"][1] == "1F0 B0 F1 B1 F2 B2"
    assert "export default { render }" in widget._esm


def test_python_hears_of_every_change():
    widget, heard = timeline().widget(), []
    widget.observe(lambda change: heard.append((change.name, change.new)), ["time", "costs", "selection"])
    widget.costs = {"F": 2}
    widget.time = 4
    widget.selection = "0B1"
    assert heard == [("costs", {"F": 2}), ("time", 4.0), ("selection", "0B1")]


def test_an_unknown_cost_is_refused():
    with pytest.raises(traitlets.TraitError, match="costs has no 'bandwidth'; known are B, F, I"):
        timeline().widget(costs={"bandwidth": 1})


def test_showing_another_timeline_starts_anew():
    widget = timeline().widget(time=2, costs={"F": 3}, selection="0F0")
    widget.show(timeline("gpipe"))
    assert (widget.time, widget.costs, widget.selection) == (None, {}, "")
    assert widget.spec["tracks"][0]["name"] == "GPipe"


def test_published_pages_show_the_element():
    data, _ = timeline().widget()._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/html"].startswith("<dp-timeline ")
