"""The copy of library and course that submissions run with: no solutions lie beside it, and nothing else writes to it.

In: a folder.  Out: the packages in it, compiled from their sources; a digest that tells whether a file has changed.
Python believes a compiled file without reading the source, so the copy has only those that were compiled here.
"""

import compileall
import hashlib
import os
import py_compile
import shutil
import stat
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]
PACKAGES = ("dualpipe_course", "dualpipe_lab", "dualpipe_ours")
HIDDEN = ("PWD", "OLDPWD", "PYTHONPYCACHEPREFIX")  # of the environment: where the grader runs, another place for bytes


class Copy:
    """The packages with compiled files, kept in memory, where no submission reaches them."""

    def __init__(self, scratch: Path) -> None:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        for package in PACKAGES:
            shutil.copytree(HERE / package, scratch / package, ignore=ignored)
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH  # the files may be written at any time
        compileall.compile_dir(scratch, quiet=2, invalidation_mode=mode)
        self._files = _files(scratch)
        shutil.rmtree(scratch)

    def is_at(self, folder: Path) -> bool:
        """Whether a folder holds this copy and nothing else."""
        try:
            return _files(folder) == self._files
        except OSError:
            return False

    def restore(self, folder: Path) -> None:
        """Write the copy into a folder, unless it is there."""
        if self.is_at(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in self._files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def digest() -> str:
    """Return a digest of all files of the packages that are no compiled ones."""
    found = hashlib.sha256()
    for name, content in _files(HERE).items():
        if "__pycache__" not in name:
            found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _files(folder: Path) -> dict[str, bytes]:
    """The files of the packages below a folder by name; a link or a pipe stands there by its kind."""
    paths = [path for package in PACKAGES for path in sorted((folder / package).rglob("*")) if not _is_folder(path)]
    return {str(path.relative_to(folder)): path.read_bytes() if _is_file(path) else b"no file" for path in paths}


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def environment(course: Path) -> dict[str, str]:
    """Return this environment for a process that imports the packages from a copy and writes no compiled files."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(course), *(path for path in given if path and not is_checkout(path))]
    kept = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def close_path() -> None:
    """Take every checkout of the course off `sys.path`: what this process starts gets the rest."""
    sys.path[:] = [path for path in sys.path if not is_checkout(path)]


def is_checkout(path: str) -> bool:
    """Whether a folder of `sys.path` holds the course together with its solutions."""
    return os.path.isdir(os.path.join(path, "dualpipe_course")) and os.path.isdir(os.path.join(path, "solutions"))
