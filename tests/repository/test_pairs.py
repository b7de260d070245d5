"""Pages and their notebooks: the check that keeps each pair alike names the drift and writes nothing."""

import shutil
from pathlib import Path

import jupytext
import pytest
from scripts import load

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "book"


@pytest.fixture
def check(monkeypatch, capsys):
    """Run the pair check in a folder; return its exit status and what it printed."""
    main = load(ROOT / "tools" / "check_pairs.py").main

    def run(folder):
        monkeypatch.chdir(folder)
        status = main([])
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def pair(tmp_path):
    """A folder with one page and its notebook that agree."""
    (tmp_path / "book").mkdir()
    for suffix in (".md", ".ipynb"):
        shutil.copy(BOOK / f"intro{suffix}", tmp_path / "book")
    return tmp_path / "book" / "intro.md"


def test_the_book_s_pairs_agree(check):
    status, printed = check(ROOT)
    assert status == 0, printed


def change_text(page):
    page.write_text(page.read_text().replace("# DualPipe Lab", "# Another title"))
    return "Cell content differ on markdown cell #1"


def add_a_cell(page):
    number = len(jupytext.read(page).cells)
    page.write_text(page.read_text() + "\n+++\n\nMore.\n")
    return f"No cell corresponding to markdown cell #{number + 1}"


def remove_the_notebook(page):
    page.with_suffix(".ipynb").unlink()
    return "has no notebook beside it"


def remove_the_page(page):
    page.unlink()
    return "has no .md page"


def store_an_output(page):
    notebook = jupytext.read(page.with_suffix(".ipynb"))
    notebook.cells[1]["execution_count"] = 3
    jupytext.write(notebook, page.with_suffix(".ipynb"))
    return "carries outputs"


CHANGES = [change_text, add_a_cell, remove_the_notebook, remove_the_page, store_an_output]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_drift_is_named_with_its_remedy_and_nothing_is_written(check, pair, change):
    assert check(pair.parents[1])[0] == 0
    message = change(pair)
    before = {path: path.read_bytes() for path in pair.parent.iterdir()}
    status, printed = check(pair.parents[1])
    assert status == 1
    assert message in printed
    assert "make pairs" in printed
    assert {path: path.read_bytes() for path in pair.parent.iterdir()} == before
