"""Write the wheel, the exercises and the built book as one archive, for classrooms without a network.

Usage: release.py [FOLDER]     the archive is FOLDER/dualpipe-lab-VERSION.zip (default: dist); `make book` comes first
"""

import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

BOOK = Path("_build/html")
FILES = ("LICENSE", "LICENSE-text", "requirements.lock")
README = """\
# DualPipe Lab {version}

| here | what it is |
|---|---|
| `{wheel}` | the library and the checks of the exercises |
| `exercises/` | the notebooks |
| `book/` | {book} |
| `requirements.lock` | the packages that the course was tested with, torch excepted ({torch}) |

## Installing without a network

Once, on a machine with a network and the same system and Python (3.11 to 3.13) as the classroom's, beside this file:

```bash
python3 -m pip download --dest wheels {torch}     # --index-url: the index of torch's CPU builds, see below
python3 -m pip download --dest wheels --require-hashes --requirement requirements.lock
```

On Linux pip's default is torch for NVIDIA GPUs (about 9 GB once installed). The course needs the CPU build: PyTorch's
page "Start Locally" shows the address of its index. Carry this folder with `wheels` into the classroom, and there:

```bash
python3 -m venv .venv
.venv/bin/pip install --no-index --find-links wheels {torch}
.venv/bin/pip install --no-index --find-links wheels --require-hashes --requirement requirements.lock
.venv/bin/pip install --no-index --no-deps {wheel}
.venv/bin/jupyter lab exercises
```

The library alone, without notebooks: `pip install {wheel}`; its extras are `[notebook]`, `[grading]`, `[book]`.
To grade a folder of notebooks: `dualpipe-lab grade FOLDER --exercises exercises`; with `--nbval` each also runs as a
whole, and its outputs are compared with the stored ones.
"""
WITH_BOOK = "the book: open `book/index.html` in a browser, no server and no network needed"
WITHOUT_BOOK = "not here. This archive was made without the built book: `make book`, then `make release`, adds it"


def build_wheel(folder: Path) -> Path:
    """Build the library's wheel into an empty folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder.resolve())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def contents(wheel: Path, has_book: bool) -> Iterator[tuple[Path, str]]:
    """Return each file of the archive, and its place there."""
    yield wheel, wheel.name
    for name in FILES:
        yield Path(name), name
    listed = subprocess.run(["git", "ls-files", "-z", "exercises"], capture_output=True, text=True, check=False)
    found = listed.stdout.split("\0") if listed.stdout else map(str, Path("exercises").rglob("*"))
    for name in sorted(filter(None, found)):
        if Path(name).is_file():
            yield Path(name), name
    for file in sorted(BOOK.rglob("*")) if has_book else ():
        if file.is_file():
            yield file, f"book/{file.relative_to(BOOK).as_posix()}"


def main(folder: Path) -> None:
    """Write the archive of the project in the current folder."""
    version = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    pins = Path("requirements.txt").read_text(encoding="utf-8").splitlines()
    torch = next(line for line in pins if line.startswith("torch=="))
    has_book = (BOOK / "index.html").exists()
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"dualpipe-lab-{version}.zip"
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        wheel = build_wheel(Path(scratch))
        for file, name in contents(wheel, has_book):
            out.write(file, f"{archive.stem}/{name}")
        book = WITH_BOOK if has_book else WITHOUT_BOOK
        readme = README.format(version=version, wheel=wheel.name, torch=torch, book=book)
        out.writestr(f"{archive.stem}/README.md", readme)
    print(f"==> {archive}: {archive.stat().st_size / 2**20:.0f} MB, {'with' if has_book else 'WITHOUT'} the book")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
