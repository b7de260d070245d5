"""Live cells of the pages: where they are, and that nothing that was saved or published needs a widget manager."""

import json
import re

import nbformat
import pytest
from built_pages import HTML, ROOT, Visit, toc_pages
from chapter_cells import cells

from dualpipe_lab.viz import play
from dualpipe_lab.viz.live import play as live_play

LIVE = [
    page for page in toc_pages() if any(re.search(r"(?<!\w)play\(", cell.code) for cell in cells(ROOT / f"{page}.md"))
]
THIRTY = """0F0 0F1 0I0 0F2 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3
1F0 1I0 1F1 1W0 1I1 1F2 1W1 1I2 1F3 1W2 1I3 1W3"""
# What the pages ask their readers to move, and what is read there then: the answers that the pages give.  Controls have
# the names that they show; "order", "compute" and "comm" are rows to edit.  Pages without a live cell move a timeline.
ASKED = {
    "book/intro": [({"F&B": 2}, "52 ticks")],
    "book/start/ranks-and-messages": [({"num_ranks": 8}, "steps 14 14")],
    "book/dp/zero-3": [
        ({"model": "Llama 3 70B"}, "GPUs between steps, ZeRO-3 15"),
        ({"model": "Llama 3 8B"}, "GPUs between steps, ZeRO-1 3"),
    ],
    "book/dp/topology": [
        ({"axes": "pp dp tp", "kind": "pp"}, "(5, 13)"),
        ({"axes": "tp dp pp", "kind": "tp"}, "its group (5, 13) nodes 2"),
    ],
    "book/tp/block": [({"ranks": 8}, "115 MB kept, 587 MB sent"), ({"ranks": 16, "model": "70B"}, "70B, 16 ranks")],
    "book/pp/pp-basic": [
        ({"num_ranks": 8}, "120 ticks bubble fraction 87.5%"),
        ({"num_ranks": 4, "num_microbatches": 5}, "48 ticks bubble fraction 37.5%"),
    ],
    "book/pp/gpipe": [
        ({"F": 3}, "bubble fraction 27.3%"),
        ({"F": 1, "W": 3}, "bubble fraction 27.3%"),
        ({"W": 1, "latency": 1}, "bubble fraction 38.5%"),
        ({"latency": 0, "num_microbatches": 27}, "bubble fraction 10.0% 10.0% peak live activations 27"),
    ],
    "book/pp/gradient-checkpointing": [
        ({}, "units on rank 0 288"),
        ({"schedule": "1f1b"}, "units on rank 0 144"),
        ({"schedule": "gpipe", "recomputed": "yes"}, "units on rank 0 40"),
        ({"num_microbatches": 34}, "units on rank 0 144"),
    ],
    "book/pp/one-f-one-b": [
        ({"schedule": "gpipe", "latency": 1}, "39 ticks"),
        ({"schedule": "1f1b", "latency": 1}, "49 ticks"),
        ({"schedule": "gpipe", "latency": 1, "num_microbatches": 16}, "63 ticks"),
    ],
    "book/pp/pipedream": [
        ({"num_minibatches": 24}, "11.1% 11.1%"),
        ({"num_ranks": 8, "num_minibatches": 24}, "22.6% 22.6%"),
    ],
    "book/pp/interleaved": [
        ({"num_virtual_stages": 2, "latency": 2}, "370 ticks"),
        ({"num_virtual_stages": 2, "latency": 6}, "426 ticks"),
        ({"num_virtual_stages": 4, "latency": 0}, "19 on"),
    ],
    "book/pp/zero-bubble": [({"in_flight": 7}, "bubble fraction 11.1%"), ({"in_flight": 7, "W": 0}, "ticks")],
    "book/pp/v-shapes": [
        ({"schedule": "zbv", "I": 12, "W": 8}, "636 ticks"),
        ({"schedule": "zbv", "I": 12, "W": 8, "num_microbatches": 20}, "1236 ticks"),
    ],
    "book/pp/easy-dualpipe": [
        ({"num_microbatches": 4, "W": 0}, "10 ticks"),
        ({"num_microbatches": 20, "schedule": "1f1b", "W": 1}, "69 ticks"),
        ({"num_microbatches": 7, "schedule": "easy_dualpipe"}, "even number of microbatches"),
    ],
    "book/pp/dualpipe": [
        ({"F&B": 2}, "22 ticks"),
        ({"num_microbatches": 24}, "ticks"),
        ({"num_ranks": 5}, "an even number of ranks, got 5: the middle one would hold its stage twice"),
    ],
    "book/pp/dualpipe-overlap": [({"F&B": 15}, "480 ticks"), ({"F&B": 30}, "660 ticks")],
    "book/pp/dualpipev": [
        ({"num_ranks": 3}, "640 ticks"),
        ({"num_ranks": 5}, "680 ticks"),
        ({"num_ranks": 4, "num_microbatches": 7}, "at least two microbatches per rank, got 7 for 4 ranks"),
        ({"num_microbatches": 10, "F&B": 25}, "590 ticks"),
    ],
    "book/pp/explorer": [({"order": THIRTY}, "30 ticks 34 ticks")],
    "book/ep/one-f-one-b-basic": [
        ({"tau": 4}, "56 ticks 56 ticks"),
        ({"tau": 2, "compute": "A_F0 M_F0 A_F1 M_F1 M_B1 M_W1 A_B1 A_W1 M_B0 M_W0 A_B0 A_W0"}, "34 ticks 40 ticks"),
    ],
    "book/ep/one-f-one-b-overlap": [
        ({"tau": 2}, "24 ticks 24 ticks"),
        ({"comm": "D_F0 C_B1 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1"}, "ticks 24 ticks compute stream waits 4 ticks 0 ticks"),
        ({"compute": "M_F0 A_F0 M_B1 M_W1 A_B1 A_W1 A_F1 M_B0 M_W0 M_F1 A_B0 A_W0"}, "nothing goes on before"),
    ],
    "book/ep/eplb": [({"num_groups": 1}, "max/mean 1.19"), ({"num_groups": 4, "num_slots": 32}, "max/mean 1.16")],
    "book/whole/cuts": [({"pp": 4, "schedule": "dualpipe"}, "dualpipe"), ({"pp": 2, "tp": 4}, "4")],
    "book/whole/training": [({"decay": "linear", "num_warmup": 0}, "mean factor")],
    "book/whole/deepseek": [({"travel": 5}, "pair, ms"), ({"travel": 0, "forward": 0, "backward": 1}, "pair, ms")],
}
# what a page shows in place of a widget, and what would have to be fetched to show one
LOST = re.compile(
    r"vnd\.jupyter\.widget-(?:view|state)|Error displaying widget|Loading widget|html-manager|"
    r"\b(?:IntSlider|Dropdown|Checkbox|Textarea|VBox|HBox|GridBox|LiveWidget)\("
)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def text_of(output):
    """An output as a front end stores it, without the script of the drawings."""
    return re.sub(r"<script data-dualpipe-lab>.*?</script>", "", json.dumps(output), flags=re.DOTALL)


def test_every_page_with_a_live_cell_says_what_is_asked_of_it():
    assert set(LIVE) <= set(ASKED)


def test_no_saved_output_needs_a_widget_manager():
    notebooks = [path for folder in ("book", "exercises", "solutions") for path in (ROOT / folder).rglob("*.ipynb")]
    assert len(notebooks) > 80
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        assert "widgets" not in notebook.metadata, path
        for output in outputs(notebook):
            assert not LOST.search(text_of(output)), path


def test_no_published_page_shows_what_a_widget_leaves():
    if not (HTML / "index.html").exists():
        pytest.skip("the book is not built (make book)")
    for path in toc_pages():
        html = (HTML / f"{path}.html").read_text("utf-8")
        shown = re.sub(r"<(pre|script|code|dp-\w+)\b.*?</\1>", "", html, flags=re.DOTALL)
        assert not LOST.search(shown), path
        assert "Run this cell in a notebook" not in html, path
        if path in LIVE:
            assert len(re.findall(r"<dp-live data-spec=.*?<(?:dp-\w+|div|svg)", html)) == 1, path


@pytest.mark.parametrize("is_live", [False, True], ids=["without a kernel", "beside a kernel"])
def test_an_exported_notebook_shows_the_element(monkeypatch, is_live):
    """nbconvert takes the saved output of a live session; what it writes holds the drawing and fetches no manager."""
    nbconvert = pytest.importorskip("nbconvert")
    pytest.importorskip("ipywidgets")
    monkeypatch.setattr(live_play, "has_kernel", lambda: is_live)
    bundle = play("1f1b", num_ranks=(2, 8))._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data=bundle)
    assert not LOST.search(text_of(output))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])])
    html, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert html.count("<dp-live data-spec=") == html.count("<dp-timeline data-spec=") == 1
    assert ("Run this cell to get its controls: num_ranks" in html) is is_live
    assert not LOST.search(re.sub(r"<script data-dualpipe-lab>.*?</script>", "", html, flags=re.DOTALL))


# Move one control, wherever on the page it is: of the live cell, or of a drawing's costs.
MOVE = """([name, value]) => {
  const live = document.querySelector("dp-live");
  const all = live ? [live, live.drawn] : document.querySelectorAll("dp-timeline");
  const labels = [...all].flatMap((e) => [...(e?.shadowRoot?.querySelectorAll("label.cost") ?? [])]);
  const label = labels.find((each) => each.querySelector("span").textContent === name);
  const input = label.querySelector("input, select, textarea");
  const size = live?.given.controls.find((control) => control.name === name);
  if (input.localName === "select") input.selectedIndex = size.words.indexOf(String(value));
  else input.value = size && input.localName === "input" ? size.words.indexOf(String(value)) : value;
  input.dispatchEvent(new Event(input.localName === "input" ? "input" : "change"));
  if (input.localName === "textarea") live.shadowRoot.querySelector(".sizes button").click();
}"""
READ = """() => {
  const live = document.querySelector("dp-live"), drawn = live ? live.drawn : document.querySelector("dp-timeline");
  const rows = live && !live.table.hidden ? live.table.querySelectorAll("tr") : [];
  const texts = [drawn?.heading, live?.status, ...rows];
  return texts.map((e) => e ? [...e.children].map((c) => c.textContent).join(" ") || e.textContent : "").join(" ");
}"""


@pytest.mark.browser
@pytest.mark.parametrize("path", ASKED)
def test_what_a_page_asks_can_be_tried_in_it(browser, site, path):
    visit = Visit(browser, site).open(path)
    has_python = visit.page.evaluate("() => 'dualpipePython' in globalThis")  # else rows are edited in the notebook
    for settings, words in ASKED[path]:
        if not has_python and {"order", "compute", "comm"} & set(settings):
            continue
        for name, value in settings.items():
            visit.page.evaluate(MOVE, [name, value])
        try:
            visit.page.wait_for_function(f"words => ({READ})().includes(words)", arg=words, timeout=20_000)
        except Exception:
            pytest.fail(f"{path}, {settings}: {words!r} is not in {visit.page.evaluate(READ)!r}")
    is_edited = any({"order", "compute", "comm"} & set(settings) for settings, _ in ASKED[path])
    assert (is_edited and not has_python) or visit.page.evaluate(
        "() => document.querySelector('dp-live')?.hint.hidden ?? true"
    )
    assert visit.complaints == []
    visit.context.close()


@pytest.mark.browser
def test_the_sizes_of_a_page_are_light():
    for path in LIVE:
        html = (HTML / f"{path}.html").read_text("utf-8")
        assert sum(map(len, re.findall(r"<dp-live data-spec='(.*?)'", html))) < 150_000, path
