"""The widget: what Python sends and refuses, what the page does with it, and what stays when no kernel answers."""

import json

import pytest
from drawing_page import element

from dualpipe_lab import Cost, schedules, simulate
from dualpipe_lab.viz import TimelineWidget
from dualpipe_lab.viz.bundle import widget_module
from dualpipe_lab.viz.spec import timeline_spec

pytest.importorskip("anywidget")
traitlets = pytest.importorskip("traitlets")


def timeline(name="1f1b"):
    return simulate(schedules.build(name, num_ranks=2, num_microbatches=3))


def test_a_timeline_gives_its_widget():
    widget = TimelineWidget(timeline(), time=3, selection="1F0")
    assert (widget.time, widget.selection, widget.costs, widget.playing) == (3, "1F0", {}, False)
    assert widget.spec["tracks"][0]["rows"][1] == "1F0 B0 F1 B1 F2 B2"
    assert "export default { render }" in widget._esm


def test_python_hears_of_every_change():
    widget, heard = TimelineWidget(timeline()), []
    widget.observe(lambda change: heard.append((change.name, change.new)), ["time", "costs", "selection"])
    widget.costs = {"F": 2}
    widget.time = 4
    widget.selection = "0B1"
    assert heard == [("costs", {"F": 2}), ("time", 4.0), ("selection", "0B1")]


def test_an_unknown_cost_is_refused():
    with pytest.raises(traitlets.TraitError, match="costs has no 'bandwidth'; known are B, F, I"):
        TimelineWidget(timeline(), costs={"bandwidth": 1})


def test_showing_another_timeline_starts_anew():
    widget = TimelineWidget(timeline(), time=2, costs={"F": 3}, selection="0F0")
    widget.show(timeline("gpipe"))
    assert (widget.time, widget.costs, widget.selection) == (None, {}, "")
    assert widget.spec["tracks"][0]["name"] == "GPipe"


def test_published_pages_show_the_element():
    data, _ = TimelineWidget(timeline())._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/html"].startswith("<dp-timeline ")


# ---- the page's half, with a model that keeps what it is told

MODEL = """{ values: VALUES, handlers: {}, get(name) { return this.values[name]; },
  set(name, value) { this.receive({ [name]: value }); },
  receive(values) {
    Object.assign(this.values, values);
    for (const name of Object.keys(values)) this.handlers[`change:${name}`]?.();
  },
  save_changes() {}, on(event, f) { this.handlers[event] = f; }, off() {} }"""


@pytest.fixture
def shown(page):
    """A page with a widget of 1F1B, 2 ranks and 3 microbatches; `model` is what it shares with Python."""
    values = {"element": "dp-timeline", "spec": timeline_spec([timeline()]), "time": 2, "costs": {}, "selection": ""}
    module = widget_module().replace("export default { render };", "")
    start = f"globalThis.model = {MODEL.replace('VALUES', json.dumps({**values, 'playing': False}))};"
    page.show(f"<div id='out'></div><script type='module'>{module}{start}render({{ model, el: out }});</script>")
    return page


@pytest.mark.browser
def test_the_page_tells_python_and_hears_it(shown):
    assert element(shown, "e.time") == 2
    assert shown.evaluate("model.values.costs.F") == 1  # all costs, once the page knows them
    assert shown.get_by_role("button", name="Reset costs").is_disabled()
    shown.evaluate("model.set('costs', {F: 3})")
    assert shown.evaluate("model.values.costs") == {**timeline().costs, "F": 3}
    assert element(shown, "e.makespan") == simulate(schedules.build("1f1b", 2, 3), Cost(F=3)).makespan
    shown.get_by_role("button", name="Step back").click()
    assert shown.evaluate("model.values.time") == element(shown, "e.time") == 0
    shown.get_by_role("button", name="Critical path").click()
    assert shown.evaluate("model.values.selection") == element(shown, "e.selection") == "0B2"


@pytest.mark.browser
def test_a_slider_that_rounds_the_time_does_not_stop_the_play(shown):
    shown.evaluate("model.set('playing', true)")
    shown.evaluate("model.set('time', Math.floor(model.values.time))")
    shown.wait_for_function("document.querySelector('dp-timeline').time > 3")
    assert element(shown, "e.playing") is True


@pytest.mark.browser
@pytest.mark.parametrize("names", [("playing", "time"), ("time", "playing")])
def test_stopping_keeps_the_place_or_takes_the_one_that_comes_along(shown, names):
    shown.evaluate("model.set('playing', true)")
    shown.wait_for_function("document.querySelector('dp-timeline').time > 3")
    before = element(shown, "e.time")
    shown.evaluate("model.set('playing', false)")
    assert element(shown, "e.time") >= before
    shown.evaluate("model.set('playing', true)")
    values = {"playing": False, "time": 1}
    shown.evaluate(f"model.receive({json.dumps({name: values[name] for name in names})})")
    assert (element(shown, "e.playing"), element(shown, "e.time")) == (False, 1)
