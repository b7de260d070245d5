"""Check that the names of other systems in the chapters' tables "Where it lives" were found where the tables say.

`names.csv` holds one line per page and name: in which file of which system it stands; `systems.csv` holds the version
or commit of each system that was looked into.  The last column of every table is written from both.
Usage: check_names.py                    exit 1 with one line per difference; looks into the installed torch
       check_names.py --write            write the last columns anew
       check_names.py --checkouts DIR    also look into DIR/<owner>+<name>/repo or DIR/<name>, where there is one
"""

import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent
HEADING, COLUMN = "## Where it lives", "names found in"
OURS = "-"  # the system of a backticked word that is no other system's name


class Version(NamedTuple):
    """What was looked into: a release, or a commit with its date."""

    repository: str
    version: str
    date: str


class Row(NamedTuple):
    """A row of a table: its page, line number and cells; `names` are the backticked words of the other systems."""

    page: str
    line: int
    cells: list[str]

    @property
    def names(self) -> list[str]:
        """The names to be looked up: backticked, in all columns but the first and the last."""
        return [name for cell in self.cells[1:-1] for name in re.findall(r"`([^`]+)`", cell)]


@cache
def systems() -> dict[str, Version]:
    """The versions by system."""
    with (HERE / "systems.csv").open(encoding="utf-8") as file:
        return {row["system"]: Version(row["repository"], row["version"], row["date"]) for row in csv.DictReader(file)}


def version_rows() -> list[str]:
    """The rows that the page of facts has on the versions."""
    return [f"| {name} | {v.repository} | {v.version} | {v.date or '–'} |" for name, v in systems().items()]


@cache
def found() -> dict[tuple[str, str], tuple[str, str]]:
    """System and file by page and name."""
    with (HERE / "names.csv").open(encoding="utf-8") as file:
        return {(row["page"], row["name"]): (row["system"], row["file"]) for row in csv.DictReader(file)}


def rows(page: Path) -> Iterator[Row]:
    """The rows of a page's tables under the heading, without their headers."""
    lines = page.read_text(encoding="utf-8").split("\n")
    inside = False
    for number, line in enumerate(lines):
        inside = line.startswith(HEADING) if line.startswith("## ") else inside
        is_header = number + 1 < len(lines) and lines[number + 1].startswith("|---")
        if inside and line.startswith("|") and not line.startswith("|---") and not is_header:
            yield Row(
                str(page.relative_to(ROOT)), number, [cell.strip() for cell in line.strip().strip("|").split("|")]
            )


def pages() -> list[Path]:
    """The pages that have such tables."""
    return [page for page in sorted((ROOT / "book").glob("*/*.md")) if HEADING in page.read_text(encoding="utf-8")]


def looked_up(row: Row) -> str:
    """What the last cell of a row has to say."""
    versions, where = systems(), found()
    used = [where[row.page, name][0] for name in row.names if (row.page, name) in where]
    return "; ".join(f"{name} {versions[name].version}" for name in dict.fromkeys(used) if name != OURS) or "–"


def needles(name: str) -> list[str]:
    """The identifiers of a name, each of which has to stand in its file as a word of its own."""
    return [word for word in re.findall(r"[A-Za-z_]\w{2,}", name) if word not in ("True", "False", "None")]


def missing(name: str, text: str) -> list[str]:
    """The identifiers that do not stand in a text."""
    return [word for word in needles(name) if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)]


def problems() -> list[str]:
    """What the tables, the two lists and the installed torch do not agree on, one line each."""
    where, lines = found(), []
    for row in (row for page in pages() for row in rows(page)):
        lines += [f"{row.page}:{row.line + 1}: {name!r} is not in names.csv" for name in row.names
                  if (row.page, name) not in where]  # fmt: skip
        if row.cells[-1] != looked_up(row):
            lines.append(
                f"{row.page}:{row.line + 1}: the last column is {row.cells[-1]!r}, found in {looked_up(row)!r}"
            )
    facts = (ROOT / "book" / "appendix" / "facts.md").read_text(encoding="utf-8")
    lines += [f"facts.md lacks the row {row!r}" for row in version_rows() if row not in facts]
    used = {(row.page, name) for page in pages() for row in rows(page) for name in row.names}
    lines += [f"names.csv: {page} has no {name!r} in its table" for page, name in where if (page, name) not in used]
    return lines + [
        line for (_, name), (system, file) in where.items() if system == "torch" for line in _torch(name, file)
    ]


def _torch(name: str, file: str) -> list[str]:
    import torch

    path = Path(torch.__file__).parents[1] / file
    if not path.exists():
        return [f"torch {torch.__version__} has no {file}"]
    return [
        f"{file} of torch has no {word}" for word in missing(name, f"{path.stem} {path.read_text(errors='replace')}")
    ]


def elsewhere(folder: Path) -> list[str]:
    """The names that a checkout does not have at the commit of `systems.csv`, one line each."""
    versions, lines = systems(), []
    for (page, name), (system, file) in found().items():
        if system in (OURS, "torch"):
            continue
        version = versions[system]
        candidates = (folder / version.repository.replace("/", "+") / "repo", folder / version.repository.split("/")[1])
        checkout = next((path for path in candidates if path.exists()), None)
        if checkout is None:
            continue
        command = ["git", "-C", str(checkout), "show", f"{version.version}:{file}"]
        shown = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        lines += [
            f"{page}: {file} of {system} has no {word}" for word in missing(name, f"{Path(file).stem} {shown.stdout}")
        ]
    return lines


def write() -> None:
    """Write the last column of every table, and its header where it has none yet."""
    for page in pages():
        lines = page.read_text(encoding="utf-8").split("\n")
        for row in rows(page):
            lines[row.line] = f"| {' | '.join([*row.cells[:-1], looked_up(row)])} |"
        page.write_text("\n".join(lines), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run as the module's docstring says."""
    if arguments == ["--write"]:
        write()
    lines = problems()
    if arguments[:1] == ["--checkouts"]:
        lines += elsewhere(Path(arguments[1]))
    print("\n".join(lines) or "names: the tables say where each name was found")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
