"""Every cell of the lecture table has chapter, notebook, real processes, exercises, backward, NCCL cell and widget."""

from pathlib import Path

from scripts import load

ROOT = Path(__file__).parents[2]


def test_every_cell_keeps_its_promises():
    tool = load(ROOT / "tools" / "lecture_table.py")
    rows = tool.table(ROOT)
    assert len(rows) == 37
    assert tool.broken(rows) == []
