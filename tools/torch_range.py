"""Name one end of the range of torch versions that the library declares, for the weekly job that runs both.

Usage: torch_range.py oldest|newest      prints such as torch==2.10.*
"""

import re
import sys
import tomllib
from pathlib import Path


def end_of_range(dependencies: list[str], which: str) -> str:
    """Return the requirement of the oldest or the newest minor version.

    >>> end_of_range(["numpy", "torch>=2.10,<2.15"], "newest")
    'torch==2.14.*'
    """
    found = next(match for line in dependencies if (match := re.fullmatch(r"torch>=(\d+)\.(\d+),<\1\.(\d+)", line)))
    major, lowest, above = (int(number) for number in found.groups())
    return f"torch=={major}.{lowest if which == 'oldest' else above - 1}.*"


def main(which: str) -> None:
    """Print the requirement."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(end_of_range(project["dependencies"], which))


if __name__ == "__main__":
    main(sys.argv[1])
