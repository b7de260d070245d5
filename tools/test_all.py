"""Run book, tests and tests on the stand-in for NCCL on every Python of the course that is here; say which are not.

Each Python gets a copy of the working tree and an environment from the lock, in FOLDER/<version>, by default
_all/<version>; both are kept, so that a second run is quicker.  An image is built where docker or podman runs.
Usage: test_all.py [FOLDER]
       test_all.py --list      only say which Pythons are found
TORCH_INDEX_URL: as for tools/install.sh; without it pip may bring torch for NVIDIA GPUs, about 9 GB for each Python.
"""

import os
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).parents[1]


def find(version: str) -> str:
    """Return the command of a Python of this version that runs, on the path or among pyenv's; else an empty string."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}") or ""]
    candidates += map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))
    for candidate in filter(None, candidates):  # a shim of pyenv exists for versions that are switched off
        code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return candidate
    return ""


def copy(folder: Path) -> None:
    """Copy the working tree: files that git tracks, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)


def run(version: str, python: str, folder: Path) -> bool:
    """Run book and tests on one Python; return whether both passed."""
    copy(folder)
    environment = os.environ | {"DUALPIPE_LAB_BUILD_IMAGE": "1"}
    environment.pop("PYTHONPATH", None)
    for target in ("book", "test", "test-stand-in"):
        started = time.monotonic()
        print(f"==> Python {version}: make {target} in {folder}", flush=True)
        done = subprocess.run(["make", target, f"PYTHON={python}"], cwd=folder, env=environment, check=False)
        state = "passed" if done.returncode == 0 else "failed"
        seconds = time.monotonic() - started
        print(f"==> Python {version}: make {target} {state} in {seconds:.0f} s, {date.today()}", flush=True)
        if done.returncode:
            return False
    return True


def main(arguments: list[str]) -> int:
    """Run all; return the exit status."""
    found = {version: find(version) for version in VERSIONS}
    for version, python in found.items():
        print(f"Python {version}: {python or 'not found, so nothing of it is tested'}", flush=True)
    if arguments == ["--list"]:
        return 0
    folder = Path(arguments[0] if arguments else ROOT / "_all").resolve()
    passed = {version: run(version, python, folder / version) for version, python in found.items() if python}
    for version in VERSIONS:
        print(
            f"Python {version}: {'not found' if version not in passed else 'passed' if passed[version] else 'failed'}"
        )
    return 0 if passed and all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
