"""Environments that hold what a wheel requires and nothing else, made without a network.

pip would fetch the requirements, torch among them, for minutes.  Here they are linked: for the wheel's requirements
without extras, and for what these require in turn, each installed package's files appear in a fresh environment.  A
module outside of that closure cannot be imported there.  The wheel itself is installed by pip.
"""

import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def build_wheel(folder):
    """Build the library's wheel as `make release` does; return its path."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; requirements.lock has it")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def declared(wheel):
    """What a wheel requires without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    return without_extras(lines)


def without_extras(lines):
    """Those requirements that hold here when no extra is asked for."""
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


def closure(requirements):
    """The installed distributions that requirements need, directly or in turn."""
    found, waiting = {}, list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found:
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            pytest.fail(f"{requirement} is required and not installed here")
        assert requirement.specifier.contains(installed.version, prereleases=True), (
            f"{requirement}: {installed.version}"
        )
        found[name] = installed
        waiting += without_extras(installed.requires or [])
    return found


def empty_environment(folder, wheel):
    """Make an environment with the wheel and what it requires; return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for installed in closure(declared(wheel)).values():
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(installed.locate_file(top))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    command = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python
