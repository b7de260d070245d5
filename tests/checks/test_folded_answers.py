"""A chapter's answers are folded where its notebook is opened, as they are on its page."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDED = {"source_hidden": True, "outputs_hidden": True}


def test_every_folded_answer_of_a_page_is_folded_in_its_notebook():
    found = [
        (path.name, cell["metadata"])
        for path in (ROOT / "book").rglob("*.ipynb")
        if ".ipynb_checkpoints" not in path.parts
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if "hide-cell" in cell["metadata"].get("tags", [])
    ]
    written = [line for page in (ROOT / "book").rglob("*.md") for line in page.read_text().splitlines()]
    assert len(found) == sum("hide-cell" in line for line in written if line.startswith(("tags:", ":tags:"))) > 0
    assert not [name for name, metadata in found if metadata.get("jupyter") != FOLDED]
