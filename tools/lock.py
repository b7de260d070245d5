"""Write requirements.txt (the course) and requirements-dev.txt (its tools) from pyproject.toml.

Each extra is installed into a fresh environment, and every version found there is pinned.  Packages that only a
torch build for GPUs brings are left out: torch pins them itself.
Usage: make lock     (needs only Python's standard library)
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

OWN = "dualpipe-lab"
GPU_BUILD_ONLY = re.compile(r"(nvidia-|cuda-|triton\b)")
COURSE_HEADER = """\
# The course: library, book, notebooks.  Written by `make lock` from pyproject.toml; do not edit.
-e .
"""
TOOLS_HEADER = """\
# What tests, checks and benchmarks need on top.  Written by `make lock` from pyproject.toml; do not edit.
-r requirements.txt
"""


def install(python: str, extra: str) -> None:
    """Install this project with one extra, showing pip's progress."""
    subprocess.run([python, "-m", "pip", "install", "-e", f".[{extra}]"], check=True)


def frozen(python: str) -> list[str]:
    """Every installed package as NAME==VERSION, without this project and without build labels such as +cpu."""
    command = [python, "-m", "pip", "list", "--format=freeze", "--exclude", OWN, "--exclude", "pip"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line.split("+")[0] for line in listed.splitlines() if "==" in line]
    return sorted((line for line in lines if not GPU_BUILD_ONLY.match(line)), key=str.lower)


def main() -> None:
    """Lock the course first, then what the development tools add to it."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = str(Path(scratch) / "bin" / "python")
        install(python, "book")
        course = frozen(python)
        install(python, "dev")
        tools = [line for line in frozen(python) if line not in course]
    Path("requirements.txt").write_text(COURSE_HEADER + "\n".join(course) + "\n", encoding="utf-8")
    Path("requirements-dev.txt").write_text(TOOLS_HEADER + "\n".join(tools) + "\n", encoding="utf-8")
    print(f"==> locked {len(course)} packages for the course and {len(tools)} for development", file=sys.stderr)


if __name__ == "__main__":
    main()
