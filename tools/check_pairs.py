"""Check that every executable page says the same in its .md (the source) and its .ipynb (for notebook readers).

Compared per cell: type, text and tags.  The notebook must also be free of outputs.  Nothing is written.
Usage: check_pairs.py          exit 1 with one line per difference
       check_pairs.py --list   print the .md files that own a notebook
"""

import sys
from pathlib import Path
from typing import NamedTuple

import jupytext

FOLDERS = ("book", "exercises", "solutions")
FOLDERS_WITH_OUTPUTS = ("solutions",)
REMEDY = "remedy: edit the .md only, then run `make pairs` (it writes the .ipynb from the .md)"


class Cell(NamedTuple):
    """One cell as far as the two files must agree."""

    kind: str
    text: str
    tags: tuple[str, ...]


def cells(path: Path) -> list[Cell]:
    """Read a page's cells from either form."""
    notebook = jupytext.read(path)
    return [Cell(c.cell_type, c.source.strip(), tuple(c.metadata.get("tags", ()))) for c in notebook.cells]


def sources(root: Path) -> list[Path]:
    """The executable pages: those whose header names jupytext's MyST format."""
    pages = (page for folder in FOLDERS for page in sorted((root / folder).rglob("*.md")))
    pages = (page for page in pages if ".ipynb_checkpoints" not in page.parts)
    return [page for page in pages if "format_name: myst" in page.read_text(encoding="utf-8")[:1000]]


def differences(page: Path) -> list[str]:
    """What separates a page from its notebook, one line each."""
    notebook = page.with_suffix(".ipynb")
    if not notebook.exists():
        return [f"{page} has no notebook beside it"]
    left, right = cells(page), cells(notebook)
    problems = [_describe(page, i, a, b) for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b][:1]
    if not problems and len(left) != len(right):
        problems = [f"{page} has {len(left)} cells, its notebook {len(right)}"]
    if page.parts[0] not in FOLDERS_WITH_OUTPUTS and _has_outputs(notebook):
        problems.append(f"{notebook} carries outputs; the book makes them when it is built")
    return problems


def _describe(page: Path, index: int, left: Cell, right: Cell) -> str:
    field = next(name for name in Cell._fields if getattr(left, name) != getattr(right, name))
    first_line = left.text.splitlines()[0] if left.text else "(empty)"
    return f"{page}, cell {index} ({left.kind}, {first_line!r}): its {field} differs in {page.stem}.ipynb"


def _has_outputs(notebook: Path) -> bool:
    return any(cell.get("outputs") or cell.get("execution_count") for cell in jupytext.read(notebook).cells)


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
