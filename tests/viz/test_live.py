"""Live cells: numbers, verdict and closed form for the values of their controls, and what stays without a kernel."""

import base64
import json
import re
import sys
import zlib
from dataclasses import replace
from html import unescape
from itertools import product

import pytest
from drawing_page import check_accessibility, element

from dualpipe_lab import Cost, schedules, simulate
from dualpipe_lab.ep import overlap
from dualpipe_lab.viz import RankValues, Steps, compare, play
from dualpipe_lab.viz.live.pipeline import schedule_outcome
from dualpipe_lab.viz.live.play import answer


def spec_of(html):
    return json.loads(unescape(re.search(r"<dp-live data-spec='(.*?)'>", html)[1]))


def test_a_schedule_follows_its_controls():
    live = play("1f1b", num_ranks=(2, 8), num_microbatches=(1, 16)).set(num_ranks=5, F=3, latency=2)
    timeline = simulate(schedules.build("1f1b", 5, 8), Cost(F=3, latency=2))
    assert live.outcome.drawing == timeline
    numbers = live.outcome.numbers
    assert numbers["makespan"] == (f"{timeline.makespan} ticks", "")
    assert numbers["bubble fraction"] == (f"{timeline.bubble_fraction:.1%}", "")
    assert numbers["peak live activations"] == ("5 on rank 0", "5")
    assert live.outcome.remark.startswith("No closed form here: 1F1B has this closed form for equal stages")
    assert live.set(latency=0).outcome.numbers["makespan"] == ("60 ticks", "60 ticks")
    assert "accepts" in live.outcome.verdict


def test_the_closed_form_beside_a_number_equals_it(subtests):
    for name in schedules.names(synchronous=True):
        with subtests.test(name=name):
            compared = 0
            for size in ((2, 4), (4, 4), (4, 8), (6, 12), (3, 7)):
                try:
                    numbers = schedule_outcome(name, *size, F=2, I=2, W=2).numbers
                except ValueError:
                    continue  # a size that this schedule does not have
                for value, form in numbers.values():
                    if form:
                        assert value.split(" on ")[0] == form
                        compared += 1
            assert compared >= 3


def test_the_closed_form_is_the_librarys(monkeypatch):
    monkeypatch.setitem(schedules._KNOWN, "gpipe", replace(schedules.named("gpipe"), makespan=lambda: 1000))
    assert schedule_outcome("gpipe", 2, 2).numbers["makespan"] == ("9 ticks", "1000 ticks")


def test_what_a_schedule_refuses_is_one_sentence_and_the_drawing_stays():
    live = play(["1f1b", "dualpipe"], num_microbatches=(1, 16))
    before = live.outcome
    live.set(schedule="dualpipe", num_ranks=3)
    assert live.error.startswith("dualpipe needs an even number of ranks, got 3")
    assert live.outcome is before
    assert "\n" not in live.state["error"]
    assert live.set(num_ranks=4).error == ""


def test_an_option_goes_to_the_schedules_that_have_it():
    live = play(["1f1b", "interleaved"], num_virtual_stages=(1, 4), num_microbatches=8, latency=0)
    assert [control.name for control in live.controls] == ["schedule", "num_ranks", "F", "I", "W", "num_virtual_stages"]
    assert live.set(num_virtual_stages=4).error == ""
    assert live.set(schedule="interleaved").outcome.drawing == simulate(
        schedules.build("interleaved", 4, 8, num_virtual_stages=4)
    )


def test_the_reader_edits_an_order():
    live = play(schedules.build("gpipe", 2, 3), I=2)
    assert live.values["order"] == "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1: 1F0 1F1 1F2 1B0 1B1 1B2"
    live.set(order="0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    assert live.outcome.drawing == simulate(schedules.build("1f1b", 2, 3), Cost(I=2))
    assert live.outcome.numbers["peak live activations"] == ("2 on rank 0", "3 on every rank")
    for order, words in (
        ("0B0 0F0 0F1 0F2 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2", "before"),
        ("0F0 nonsense", "rank 0, position 1: 'nonsense' is not an action"),
        ("0F0 0B0", "the order has 1 rows, GPipe has 2 ranks"),
    ):
        assert words in live.set(order=order).error
    assert live.outcome.numbers["peak live activations"][0] == "2 on rank 0"


PYTHON = """const asked = [], answered = [];
globalThis.dualpipePython = {
  ask: (call, args, say) => (asked.push([call, ...args]), say("checking"), Promise.resolve(answered.shift())),
};"""


@pytest.mark.parametrize(
    ("what", "edits", "fixed"),
    [
        (overlap.one_f_one_b_basic(1), {"compute": "A_F0 M_F0 M_B0 M_W0 A_B0 A_W0"}, {}),
        (overlap.one_f_one_b_basic(1), {"comm": "nonsense"}, {}),
        (schedules.build("gpipe", 2, 2), {"order": "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1"}, {"I": 2}),
    ],
    ids=["an order", "refused", "a program"],
)
def test_a_page_asks_its_python_about_edited_rows(page, what, edits, fixed):
    def lively():
        return play(what, **fixed)

    given = spec_of(lively().to_html())["asks"]
    told = answer(json.dumps({**given, "values": {**given["values"], **edits}}))
    page.show(f"<script>{PYTHON} answered.push({json.dumps(told)});</script>{lively().to_html()}")
    assert element(page, "e.hint.hidden", "dp-live")
    for name, text in edits.items():
        page.locator(f"textarea[name={name}]").fill(text)
    page.get_by_role("button", name="Check the rows").click()
    live = lively().set(**edits)
    page.wait_for_function("() => asked.length && document.querySelector('dp-live').status.textContent !== 'checking'")
    [(call, question)] = page.evaluate("asked")
    assert (call, json.loads(question)["values"]) == ("play", live.values)
    assert element(page, "e.state.error", "dp-live") == live.error
    assert element(page, "e.state.rows", "dp-live") == live.state["rows"]
    assert element(page, "e.drawn.makespan", "dp-live") == live.outcome.drawing.makespan
    check_accessibility(page)


def test_a_function_draws_what_it_likes():
    def around(num_ranks, backwards=False, name="ring"):
        if num_ranks == 7:
            raise KeyError("seven")
        way = -1 if backwards else 1
        log = [("around", [(r, (r + way) % num_ranks, f"x{r}") for r in range(num_ranks)])]
        return Steps(name, [[f"x{r}"] for r in range(num_ranks)], log), {"messages": num_ranks, "share": (1 / 3, "1/3")}

    live = play(around, num_ranks=(2, 3, 7), backwards=False)
    assert live.drawing["tag"] == "dp-steps"
    assert live.state["rows"] == [["messages", "3", ""], ["share", "0.3333", "1/3"]]
    assert live.set(backwards=True).drawing["spec"]["steps"][0]["messages"][0][:2] == (0, 2)
    assert live.set(num_ranks=7).error == "KeyError: 'seven'"
    drawing = RankValues("sum", [("before", [[1], [2]])])
    assert play(lambda n: drawing, n=(1, 2)).drawing == {"html": drawing._repr_html_()}
    both = compare(*(simulate(schedules.build(name, 2, 2)) for name in ("gpipe", "1f1b")))
    assert len(play(lambda n: both, n=(1, 2)).drawing["spec"]["tracks"]) == 2


@pytest.mark.parametrize(
    ("controls", "words"),
    [
        ({"num_ranks": (8, 2)}, r"num_ranks: a slider is .*, got \(8, 2\)$"),
        ({"num_ranks": (1, "a")}, r"num_ranks: a slider is .*, got \(1, 'a'\)$"),
        ({"F": (1, 2, 3, 4)}, "F: a slider is"),
        ({"schedule": []}, "schedule: a choice needs"),
        ({"num_ranks": (0, 4), "num_microbatches": (0, 0)}, "num_microbatches"),
    ],
)
def test_controls_that_cannot_be_are_refused_at_once(controls, words):
    with pytest.raises(ValueError, match=words):
        play("gpipe", **controls)
    with pytest.raises(ValueError, match="there is no schedule named 'pipe'"):
        play("pipe")
    with pytest.raises(ValueError, match="there is no control 'ranks'; use one of num_ranks"):
        play("gpipe").set(ranks=2)


def test_without_a_kernel_the_html_plays_and_holds_every_size():
    data = play("1f1b")._repr_mimebundle_()
    assert sorted(data) == ["text/html", "text/plain"]
    html = data["text/html"]
    assert [html.count(part) for part in ("<dp-timeline ", "<img ", "<script data-dualpipe-lab>")] == [1, 1, 1]
    assert "<td>makespan</td><td>33 ticks</td><td>33 ticks</td>" in html
    assert html == play("1f1b").to_html()  # published pages do not change from build to build
    spec = spec_of(html)
    assert [(one["name"], one["words"][one["start"]]) for one in spec["controls"]] == [
        ("num_ranks", "4"),
        ("num_microbatches", "8"),
    ]
    points = json.loads(zlib.decompress(base64.b64decode(spec["points"])))
    sizes = list(product(range(2, 9), range(1, 17)))
    assert len(points) == len(sizes)
    for (p, m), point in list(zip(sizes, points, strict=True))[::9]:
        live = play("1f1b").set(num_ranks=p, num_microbatches=m)
        assert point.items() <= {**live.state, "drawing": live.drawing}.items()
        assert point["drawing"]["spec"]["tracks"][0]["rows"][0].startswith("0F0")


@pytest.mark.parametrize(
    "controls",
    [{"num_microbatches": (1, 1000)}, {"num_ranks": 4, "num_microbatches": 8}],
    ids=["too many sizes", "none"],
)
def test_what_no_page_can_hold_says_what_to_run(controls):
    spec = spec_of(play("1f1b", **controls).to_html())
    assert "points" not in spec
    assert spec["how"].startswith("Run this cell to get its controls: ")


def test_a_control_moves_on_the_page_as_in_python(page):
    """The drawing, its numbers and what is refused are Python's for that size; costs that the reader has set stay."""

    def lively():
        return play("dualpipev", num_ranks=(1, 4, 8), num_microbatches=(2, 10, 24), F=10, I=10, W=10)

    page.show(lively().to_html())
    shown = "e.drawn.tracks.map(t => [t.name, t.program.numRanks, t.makespan, [...t.start], [...t.end]])"
    for name, place, values in (("num_ranks", 4, {"num_ranks": 5}), ("num_microbatches", 1, {"num_microbatches": 3})):
        page.locator(f"input[aria-label^={name}]").fill(str(place))
        live = lively().set(**{"num_ranks": 5, **values})
        page.wait_for_function(f"() => document.querySelector('dp-live').state.error === {json.dumps(live.error)}")
        timeline = lively().set(num_ranks=5).outcome.drawing  # a refused size leaves the drawing as it was
        spans = [span for row in timeline.spans_by_rank for span in row]
        times = [[float(span.start) for span in spans], [float(span.end) for span in spans]]
        assert element(page, shown, "dp-live") == [["DualPipeV", 5, timeline.makespan, *times]]
        assert element(page, "e.state.rows", "dp-live") == lively().set(num_ranks=5).state["rows"]
    assert element(page, "e.status.textContent", "dp-live") == live.error
    assert live.error.startswith("dualpipev needs at least two microbatches per rank, got 3 for 5 ranks")
    page.locator("input[aria-label^=num_microbatches]").fill("8")
    page.locator("input[aria-label^='F&B']").fill("25")
    page.locator("input[aria-label^=num_ranks]").fill("3")
    page.wait_for_function("() => document.querySelector('dp-live').drawn.tracks[0].numRanks === 4")
    timeline = simulate(schedules.build("dualpipev", 4, 10), Cost(F=10, I=10, W=10, overlap=25))
    numbers = [["makespan", "590 ticks", "–"], ["bubble fraction", f"{timeline.bubble_fraction:.1%}", "–"]]
    assert timeline.makespan == 590
    cells = "[...e.table.querySelectorAll('tbody tr')].map(row => [...row.children].map(cell => cell.textContent))"
    assert element(page, cells, "dp-live")[:2] == numbers
    check_accessibility(page)


def test_ipywidgets_move_it(monkeypatch):
    pytest.importorskip("ipywidgets")
    # browser tests of the same process leave an event loop running, in which controls wait until they rest
    monkeypatch.setattr("asyncio.get_running_loop", lambda: exec("raise RuntimeError"))
    live = play(["gpipe", "1f1b"], num_microbatches=(1, 16))
    inputs, drawing = live.widget._inputs, live.drawing
    inputs["schedule"].value = "1f1b"
    inputs["num_microbatches"].value = 1
    assert live.widget.state["rows"] == [
        ["makespan", "12 ticks", "12 ticks"],
        ["bubble fraction", "75.0%", "75.0%"],
        ["peak live activations", "1 on every rank", "1"],
    ]
    assert live.widget.state["drawing"] == live.drawing != drawing
    assert live.widget.key in live.to_html(key=live.widget.key)


def test_without_ipywidgets_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "dualpipe_lab.viz.live.widget", raising=False)
    live = play("gpipe")
    assert live.note == 'a live cell with controls needs ipywidgets; run: pip install "dualpipe-lab[notebook]".'
    assert spec_of(live._repr_mimebundle_()["text/html"])["controls"]
    assert live.note in spec_of(play(schedules.build("gpipe", 2, 2)).to_html())["how"]


def test_costs_of_a_ranks_share_make_schedules_comparable():
    live = play(["1f1b", "interleaved"], per_rank=True, F=2, I=2, W=2, num_virtual_stages=2)
    assert live.outcome.numbers["makespan"] == ("66 ticks", "66 ticks")
    assert live.set(schedule="interleaved").outcome.numbers["makespan"] == ("57 ticks", "57 ticks")


def test_a_function_may_return_a_program_and_its_costs():
    live = play(lambda m: (schedules.one_f_one_b(2, m), Cost(F=2)), m=(1, 3))
    assert live.outcome.drawing == simulate(schedules.one_f_one_b(2, 1), Cost(F=2))
    assert live.state["rows"][0] == ["makespan", "8 ticks", ""]
    assert "accepts" in live.outcome.verdict
    assert play(lambda m: simulate(schedules.gpipe(2, m)), m=(2, 3)).state["rows"][0][1] == "9 ticks"


def test_the_reader_edits_two_streams():
    live = play(overlap.one_f_one_b_basic(1), t_op=(1, 2), tau=(0, 1, 3))
    assert live.state["rows"] == [
        ["makespan", "10 ticks", "10 ticks"],
        ["compute stream waits", "4 ticks", "4 ticks"],
        ["the longer of the two sums", "6 ticks", ""],
    ]
    split = {"compute": "A_F0 M_F0 M_B0 M_W0 A_B0 A_W0", "comm": "D_F0 C_F0 C_B0 D_B0"}
    assert live.set(**split).state["rows"][0] == ["makespan", "9 ticks", "10 ticks"]
    assert live.drawing["tag"] == "dp-timeline"
    for rows, words in (
        ({"compute": "A_F0 M_F0 M_BW0"}, "A_B0 is missing"),
        ({"compute": "A_F0 M_F0 M_BW0 A_BW0 A_F1"}, "A_F1 does not belong"),
        ({"compute": "A_F0 M_BW0 M_F0 D_F0 A_BW0"}, "D_F0 runs on the comm stream"),
        ({"compute": "A_BW0 M_BW0 A_F0 M_F0"}, "nothing goes on before A_BW0"),
    ):
        assert words in live.set(**{**split, **rows}).error
