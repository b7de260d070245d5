"""The worker: runs the given cells and one answer cell as a notebook does, and sends the requested names.

In: cells, names.  Out: the values of the names (`protocol.pack`) and the first error.
The worker is a fresh process in its own session.  Names that were defined before an error are sent too.
"""

import ast
import contextlib
import linecache
import os
import sys
import tempfile
import traceback
import types
from multiprocessing.connection import Connection
from typing import Any

from dualpipe_course.grading.protocol import encode, pack


def main(
    channel: "Connection[Any, Any]", cells: list[tuple[str, str]], names: list[str], folders: dict[str, str]
) -> None:
    """Run cells (title, source) in the scratch folders; send the values of `names` and the first error."""
    with contextlib.suppress(PermissionError):  # the fork server's child may lead a session already
        os.setsid()
    enter(folders)
    module = types.ModuleType("__main__")  # what is defined here travels to the ranks by value, as from a notebook
    sys.modules["__main__"] = module
    problem = ""
    for title, source in cells:
        if error := run_cell(title, source, module.__dict__):
            problem = problem or error
    found = {name: pack(module.__dict__[name]) for name in names if name in module.__dict__}
    channel.send_bytes(encode({"answers": found, "problem": problem[:2000]}))
    channel.close()


def enter(folders: dict[str, str]) -> None:
    """Make the scratch folders the working directory, home and temporary directory of this process."""
    os.chdir(folders["work"])
    os.environ.update({"HOME": folders["home"], "TMPDIR": folders["tmp"], "XDG_CACHE_HOME": folders["home"]})
    tempfile.tempdir = None  # it was chosen from the old TMPDIR


def run_cell(title: str, source: str, names: dict[str, Any]) -> str:
    """Execute one cell; return its error as text, or an empty string."""
    try:
        code = compile(_tree(source, title), title, "exec")
        remember(title, source)
        exec(code, names)  # noqa: S102 - it is what a notebook does
    except SystemExit:
        return f"{title} left with sys.exit()"
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == title]
        line = f", line {lines[-1]}" if lines else ""
        return f"{title}{line}: {type(error).__name__}: {str(error)[:1000]}"
    return ""


def remember(title: str, source: str) -> None:
    """Store the lines of a cell for tracebacks."""
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)


def _tree(source: str, title: str) -> ast.Module:
    """Parse a cell without its magics and shell lines: the worker has no notebook kernel."""
    try:
        return ast.parse(source, title)
    except SyntaxError:
        lines = source.splitlines()
        plain = [_without_magic(line) for line in lines]
        if plain == lines:
            raise
        return ast.parse("\n".join(plain), title)


def _without_magic(line: str) -> str:
    bare = line.lstrip()
    return line[: len(line) - len(bare)] + "pass" if bare.startswith(("%", "!")) else line
