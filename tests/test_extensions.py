"""The book's Sphinx handlers: the cache's key, the buttons, the tables of docstrings."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import load

ROOT = Path(__file__).parents[1]


def test_the_cache_key_follows_the_library_and_the_lock_file(tmp_path):
    digest = load(ROOT / "_ext" / "dp_book.py").digest_of_library
    (tmp_path / "dualpipe_lab" / "__pycache__").mkdir(parents=True)
    seen = [digest(tmp_path)]
    for name in ("dualpipe_lab/a.py", "dualpipe_lab/viz.mjs", "requirements.txt"):
        (tmp_path / name).write_text("one")
        seen.append(digest(tmp_path))
        (tmp_path / name).write_text("two")
        seen.append(digest(tmp_path))
    assert len(set(seen)) == len(seen)
    (tmp_path / "dualpipe_lab" / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "README.md").write_text("x")
    assert digest(tmp_path) == seen[-1]


@pytest.mark.parametrize(("address", "left"), [("https://github.com/ORG/x", 1), ("https://github.com/someone/x", 3)])
def test_buttons_wait_for_the_repository_s_address(address, left):
    buttons = [{"label": name} for name in ("launch-buttons", "source-repository-button", "download-buttons")]
    context = {"header_buttons": buttons}
    app = SimpleNamespace(config=SimpleNamespace(html_theme_options={"repository_url": address}))
    load(ROOT / "_ext" / "dp_book.py").hide_dead_buttons(app, "page", "page.html", context, None)
    assert len(context["header_buttons"]) == left


def test_a_module_s_tables_are_shown_as_they_are():
    keep_layout = load(ROOT / "_ext" / "dp_docstrings.py").keep_layout
    lines = ["What it is.", "", "Chapter: one.", "  a   1", "  b   2", "Source: a paper."]
    keep_layout(None, "module", "m", None, None, lines)
    table = [".. code-block:: text", "", "   a   1", "   b   2", ""]
    assert lines == ["What it is.", "", "", "Chapter: one.", "", *table, "", "Source: a paper."]
