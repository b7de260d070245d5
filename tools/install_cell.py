"""Write the cell that installs the course on Colab into every executable page of the book.

The cell does nothing anywhere else; the built book leaves it out (tag remove-cell), and JupyterLab folds it.  On Colab
it fetches a copy of the repository and installs the library without its dependencies, so that Colab's own torch stays.
The address comes from _config.yml, its one place; as long as that is a placeholder, the cell says so.
Usage: install_cell.py           write the cells that differ, in the .md pages (make pairs then writes the .ipynb)
       install_cell.py --check   exit 1 with the pages whose cell is missing or differs; nothing is written
"""

import re
import sys
from pathlib import Path

PLACEHOLDER = "/ORG/"
EXTRA = "anywidget psygnal cloudpickle"  # what Colab does not bring along; none of them depends on torch
REMEDY = "remedy: run `make pairs`"
FENCE = "```{code-cell} ipython3"
TAGS = ["remove-cell", "install"]
OPTIONS = "---\njupyter:\n  source_hidden: true\ntags: [remove-cell, install]\n---"  # folded, as jupytext writes it
_CELL = re.compile(re.escape(FENCE) + r"\n(?:(?!```).)*?tags: \[remove-cell, install\]\n.*?\n```\n\n", re.DOTALL)


def address(config: str) -> tuple[str, str]:
    """Return the repository's address and branch from the text of _config.yml."""
    found = re.search(r"^repository:\n  url: (\S+)\n  branch: (\S+)$", config, re.MULTILINE)
    if found is None:
        raise ValueError("_config.yml has no repository with url and branch; restore those two lines")
    return found[1].rstrip("/"), found[2]


def code(url: str, branch: str, folder: str) -> str:
    """Return the code of the cell for a page of `folder`, such as "book/pp"."""
    if PLACEHOLDER in url:
        return (
            'import sys\n\nif "google.colab" in sys.modules:\n'
            '    raise SystemExit("this copy has no address to install from: set repository.url in _config.yml")'
        )
    return f"""import os, subprocess, sys

if "google.colab" in sys.modules:  # fetch the course; Colab keeps its own torch
    home = "/content/dualpipe-lab"
    if not os.path.exists(home):
        subprocess.run(["git", "clone", "-q", "--depth=1", "--branch={branch}", "{url}", home], check=True)
        names = [home, *"{EXTRA}".split()]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", *names], check=True)
    os.chdir(f"{{home}}/{folder}")"""


def with_cell(text: str, source: str) -> str:
    """Return a page's text with `source` as its first code cell, once."""
    bare = _CELL.sub("", text)
    cell = f"{FENCE}\n{OPTIONS}\n{source}\n```\n\n"
    return bare.replace("```{code-cell}", f"{cell}```{{code-cell}}", 1)


def pages(root: Path) -> list[Path]:
    """The executable pages of the book."""
    found = (page for page in sorted((root / "book").rglob("*.md")) if ".ipynb_checkpoints" not in page.parts)
    return [page for page in found if "\n```{code-cell}" in page.read_text(encoding="utf-8")]


def main(arguments: list[str]) -> int:
    """Write or check the cells of the project in the current folder."""
    root = Path()
    url, branch = address((root / "_config.yml").read_text(encoding="utf-8"))
    changed = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        wanted = with_cell(text, code(url, branch, page.parent.as_posix()))
        if wanted == text:
            continue
        changed.append(f"{page}: the cell that installs the course on Colab is missing or out of date")
        if arguments != ["--check"]:
            page.write_text(wanted, encoding="utf-8")
    if arguments != ["--check"] or not changed:
        return 0
    print("\n".join([*changed, REMEDY]))
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
