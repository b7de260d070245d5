"""Write requirements.txt and the three locks from pyproject.toml, with uv's resolver.

  requirements.txt         pins for people: `pip install -r requirements.txt` installs the course and this package
  requirements.lock        with hashes, what a learner's JupyterLab needs; what builds and installs the package, too
  requirements-book.lock   with hashes, what the book's builder needs on top
  requirements-dev.lock    with hashes, what tests, checks and benchmarks need on top of both
One resolution holds for Python 3.11 to 3.13 on Linux and macOS.  torch, and what only torch brings, stands in no lock:
its files differ from platform to platform.  Its pin is the line `torch==` in requirements.txt.
Usage: lock.py             keep the versions that still fit pyproject.toml
       lock.py --upgrade   take the newest ones
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

TORCH = "torch==2.13.0"
ABSENT = " ; sys_platform == 'none'"
EDITABLE = "editables>=0.5"  # hatchling asks for it where a package is installed with `pip install -e`
INSTALLER = "uv>=0.13"  # of tools/install.sh
HEADER = "# {}  Written by `make lock` from pyproject.toml; do not edit.\n"
PEOPLE = "The course: library, book, notebooks."
LOCKS = {  # by the extra of pyproject.toml that each serves; each holds what those before it lack
    "lab": ("requirements.lock", "The library and JupyterLab with hashes, for tools/install.sh; without torch."),
    "book": ("requirements-book.lock", "What the book's builder needs on top of requirements.lock."),
    "dev": ("requirements-dev.lock", "What tests, checks and benchmarks need on top of both other locks."),
}


def requirements(project: dict[str, dict[str, list[str]]], extra: str) -> list[str]:
    """Return what the project and one of its extras declare, the extras that it includes too, without torch."""
    extras = project["optional-dependencies"]
    found = list(project["dependencies"])
    waiting = [extra]
    while waiting:
        for line in extras[waiting.pop()]:
            own = re.fullmatch(r"dualpipe-lab\[(.*)\]", line)
            waiting += own[1].split(",") if own else []
            found += [] if own else [line]
    return [line for line in found if name_of(line) != "torch"]


def name_of(requirement: str) -> str:
    """Return the package that a requirement or a pin names."""
    return re.split(r"[\[<>=~!; ]", requirement)[0].lower().replace("_", "-").replace(".", "-")


def resolve(wanted: list[str], pins: str, *options: str) -> str:
    """Resolve requirements to pins, preferring the versions in `pins`; torch is left out unless it is wanted."""
    with tempfile.TemporaryDirectory() as scratch:
        source, output, absent = (Path(scratch) / name for name in ("requirements.in", "pins.txt", "overrides.txt"))
        absent.write_text(f"torch{ABSENT}\n", encoding="utf-8")  # also where a package asks for it
        source.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        output.write_text(pins, encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
        command += ["--fork-strategy=fewest", "--no-header", "--no-annotate"]
        command += [] if TORCH in wanted else [f"--override={absent}"]
        subprocess.run([*command, *options, "--output-file", str(output), str(source)], check=True, env=_environment())
        return output.read_text(encoding="utf-8")


def _environment() -> dict[str, str]:
    """Give uv the certificate of a proxy that pip was told of."""
    certificate = os.environ.get("PIP_CERT")
    return {**({"SSL_CERT_FILE": certificate} if certificate else {}), **os.environ}


def blocks(pins: str) -> dict[str, str]:
    """Return the lines of each pin, hashes included, by package."""
    found: dict[str, str] = {}
    for block in re.findall(r"^[^\s#].*\n(?:[ \t]+.*\n)*", pins, re.MULTILINE):
        if ABSENT not in block.partition("\n")[0]:
            found[name_of(block)] = found.get(name_of(block), "") + block
    return found


def without_hashes(pins: str) -> str:
    """Return pins, one a line."""
    return re.sub(r" \\\n(?: +--hash=\S+(?: \\)?\n)+", "\n", pins)


def main(arguments: list[str]) -> None:
    """Resolve with torch, so that the versions suit it, then each lock without it."""
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(text)
    files = [Path(name) for name, _ in LOCKS.values()]
    before = "" if "--upgrade" in arguments else "".join(file.read_text() for file in files if file.exists())
    build = [*settings["build-system"]["requires"], EDITABLE, INSTALLER]
    suited = resolve([*requirements(settings["project"], "dev"), *build, TORCH], without_hashes(before))
    found: dict[str, str] = {}
    for extra, (name, header) in LOCKS.items():
        pins = blocks(resolve(requirements(settings["project"], extra) + build, suited, "--generate-hashes"))
        further = {package: block for package, block in pins.items() if package not in found}
        found |= further
        Path(name).write_text(HEADER.format(header) + "".join(further.values()), encoding="utf-8")
        print(f"==> {name}: {len(further)} packages", file=sys.stderr)
        if extra == "book":
            pinned = without_hashes("".join(found[package] for package in sorted(found)))
            Path("requirements.txt").write_text(HEADER.format(PEOPLE) + f"-e .\n{TORCH}\n{pinned}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
