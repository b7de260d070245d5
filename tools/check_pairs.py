"""Check that every executable page says the same in its .md (the source) and its .ipynb (for notebook readers).

jupytext compares the cells: type, text and tags.  Left to this file is what it has no command for: which pages have to
have a notebook, notebooks that no page owns, and stored outputs where the book makes them.  Nothing is written.
Usage: check_pairs.py          exit 1 with the first difference of each page
       check_pairs.py --list   print the .md files that own a notebook
"""

import sys
from pathlib import Path

import jupytext
from jupytext.compare import NotebookDifference, compare_cells

FOLDERS = ("book", "exercises", "solutions")
FOLDERS_WITH_OUTPUTS = ("solutions",)
REMEDY = "remedy: edit the .md only, then run `make pairs` (it writes the .ipynb from the .md)"


def sources(root: Path) -> list[Path]:
    """The executable pages: those whose header names jupytext's MyST format."""
    pages = (page for folder in FOLDERS for page in sorted((root / folder).rglob("*.md")))
    pages = (page for page in pages if ".ipynb_checkpoints" not in page.parts)
    return [page for page in pages if "format_name: myst" in page.read_text(encoding="utf-8")[:1000]]


def differences(page: Path) -> list[str]:
    """Describe how a page and its notebook differ, and which outputs a notebook must not store."""
    path = page.with_suffix(".ipynb")
    if not path.exists():
        return [f"{page} has no notebook beside it"]
    problems, cells, expected = [], jupytext.read(path).cells, jupytext.read(page).cells
    try:
        compare_cells(cells, expected, compare_outputs=False, compare_ids=False, cell_metadata_filter="tags,-all")
    except NotebookDifference as difference:
        problems.append(f"{page} and {path.name}: {difference}")
    if page.parts[0] not in FOLDERS_WITH_OUTPUTS and any(c.get("outputs") or c.get("execution_count") for c in cells):
        problems.append(f"{path} carries outputs; the book makes them when it is built")
    return problems


def orphans(root: Path, pages: list[Path]) -> list[str]:
    """Notebooks that no page owns."""
    owned = {page.with_suffix(".ipynb") for page in pages}
    found = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.ipynb")))
    strangers = [path for path in found if path not in owned and ".ipynb_checkpoints" not in path.parts]
    return [f"{path} has no .md page with jupytext's header beside it" for path in strangers]


def main(arguments: list[str]) -> int:
    """Check every pair below the current folder."""
    root = Path()
    pages = sources(root)
    if arguments == ["--list"]:
        print("\n".join(map(str, pages)))
        return 0
    problems = [line for page in pages for line in differences(page)] + orphans(root, pages)
    print("\n".join([*problems, REMEDY]) if problems else f"{len(pages)} pages agree with their notebooks")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
