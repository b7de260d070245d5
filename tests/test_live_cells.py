"""Live cells of the pages: where they are, and that nothing that was saved or published needs a widget manager."""

import json
import re

import nbformat
import pytest
from built_pages import HTML, ROOT, toc_pages
from chapter_cells import cells

from dualpipe_lab.viz import play
from dualpipe_lab.viz.live import play as live_play

LIVE = [page for page in toc_pages() if any("play(" in cell.code for cell in cells(ROOT / f"{page}.md"))]
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
    assert "Run this cell in a notebook to get its controls: num_ranks" in html
    assert not LOST.search(re.sub(r"<script data-dualpipe-lab>.*?</script>", "", html, flags=re.DOTALL))
