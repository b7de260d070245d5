"""Write requirements.txt, requirements.lock and requirements-dev.lock from pyproject.toml, with uv's resolver.

  requirements.txt        pins for people: `pip install -r requirements.txt` installs the course and this package
  requirements.lock       the same pins with hashes, for `pip install --require-hashes`; what builds the package too
  requirements-dev.lock   with hashes, what tests, checks and benchmarks need on top
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
EDITABLE = "editables>=0.5"  # hatchling asks for it where a package is installed with `pip install -e`
HEADER = "# {}  Written by `make lock` from pyproject.toml; do not edit.\n"
PEOPLE = "The course: library, book, notebooks."
COURSE = "The course with hashes, for tools/install.sh; without torch."
TOOLS = "What tests, checks and benchmarks need on top of requirements.lock."


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
    """Resolve requirements to pins, preferring the versions in `pins`."""
    with tempfile.TemporaryDirectory() as scratch:
        source, output = Path(scratch) / "requirements.in", Path(scratch) / "pins.txt"
        source.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        output.write_text(pins, encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
        command += ["--fork-strategy=fewest", "--no-header", "--no-annotate"]
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
        found[name_of(block)] = found.get(name_of(block), "") + block
    return found


def without_hashes(pins: str) -> str:
    """Return pins, one a line."""
    return re.sub(r" \\\n(?: +--hash=\S+(?: \\)?\n)+", "\n", pins)


def main(arguments: list[str]) -> None:
    """Resolve with torch, so that the versions suit it, then each lock without it."""
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(text)
    locks = Path("requirements.lock"), Path("requirements-dev.lock")
    before = "" if "--upgrade" in arguments else "".join(lock.read_text() for lock in locks if lock.exists())
    build = [*settings["build-system"]["requires"], EDITABLE]
    course = requirements(settings["project"], "book") + build
    tools = requirements(settings["project"], "dev") + build
    suited = resolve([*tools, TORCH], without_hashes(before))
    course_pins = blocks(resolve(course, suited, "--generate-hashes"))
    tool_pins = blocks(resolve(tools, suited, "--generate-hashes"))
    locks[0].write_text(HEADER.format(COURSE) + "".join(course_pins.values()), encoding="utf-8")
    further = [block for name, block in tool_pins.items() if name not in course_pins]
    locks[1].write_text(HEADER.format(TOOLS) + "".join(further), encoding="utf-8")
    people = HEADER.format(PEOPLE) + f"-e .\n{TORCH}\n" + without_hashes("".join(course_pins.values()))
    Path("requirements.txt").write_text(people, encoding="utf-8")
    print(f"==> locked {len(course_pins)} packages for the course and {len(further)} for development", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
