"""Chapters that start ranks end with a cell for GPUs; each of these cells runs here, on the stand-in for NCCL."""

import linecache
import re

import chapter_cells
import pytest

PAGES = {str(page.relative_to(chapter_cells.BOOK)): page for page in sorted(chapter_cells.BOOK.rglob("*.md"))}
RANKS = [name for name, page in PAGES.items() if chapter_cells.starts_ranks(page)]
WITHOUT_CELL = set()  # pages that start ranks and have no cell yet: shrinks, never grows


def test_every_chapter_that_starts_ranks_has_one_cell_for_gpus():
    cells = {name: [cell for cell in chapter_cells.cells(PAGES[name]) if "nccl" in cell.tags] for name in PAGES}
    assert {name for name in RANKS if len(cells[name]) != 1} == WITHOUT_CELL
    for name, found in cells.items():
        for cell in found:
            assert re.match(r"(?s).*^if lab\.nccl_ready\(\d+\):", cell.code, re.MULTILINE), name
            assert "nbval-ignore-output" in cell.tags, name


@pytest.mark.parametrize("name", [name for name in RANKS if name not in WITHOUT_CELL])
def test_the_cell_agrees_with_gloo_on_the_stand_in(name, on_stand_in, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    page = PAGES[name]
    linecache.checkcache(str(page))
    exec(compile(chapter_cells.program(page), str(page), "exec"), {"__name__": "chapter"})
    assert re.search(r"\d ranks? on NCCL agrees? with GLOO: largest difference", capsys.readouterr().out)
