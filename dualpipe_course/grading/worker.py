"""The worker: runs the given cells and one answer cell as a notebook does, and sends the requested names.

In: cells, names.  Out: the values of the names (`protocol.pack`) and the first error.
The worker is a fresh process in its own session.  Names that were defined before an error are sent too.
A cell with magics, shell lines or questions is run by IPython's own shell, so that it does what it does in JupyterLab.
"""

import ast
import asyncio
import inspect
import linecache
import os
import sys
import tempfile
import traceback
import types
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, cast

from dualpipe_course.grading import guard
from dualpipe_course.grading.protocol import encode, pack, seal_calls

ELSEWHERE = ("matplotlib", "pylab", "gui", "pip", "conda", "mamba", "micromamba", "uv")


def main(
    channel: "Connection[Any, Any]", cells: list[tuple[str, str]], names: list[str], folders: dict[str, str]
) -> None:
    """Run cells (title, source) in the scratch folders; send the values of `names` and the first error."""
    with suppress(PermissionError):  # the fork server's child may lead a session already
        os.setsid()
    enter(folders)
    module = types.ModuleType("__main__")  # what is defined here travels to the ranks by value, as from a notebook
    sys.modules["__main__"] = module
    guard.close()
    seal_calls()
    problem = ""
    with asyncio.Runner() as runner:  # one loop for all cells, as a kernel has: a task may be awaited in a later cell
        for title, source in cells:
            if error := run_cell(title, source, module.__dict__, runner):
                problem = problem or error
        runner.run(asyncio.sleep(0))  # tasks that nobody awaits begin before the check's cell
        found = {name: pack(module.__dict__[name]) for name in names if name in module.__dict__}
        channel.send_bytes(encode({"answers": found, "problem": problem[:2000], "refused": guard.refusals[:5]}))
        channel.close()


def enter(folders: dict[str, str]) -> None:
    """Make the scratch folders the working directory, home and temporary directory of this process."""
    os.chdir(folders["work"])
    os.environ.update({"HOME": folders["home"], "TMPDIR": folders["tmp"], "XDG_CACHE_HOME": folders["home"]})
    tempfile.tempdir = None  # it was chosen from the old TMPDIR


def run_cell(title: str, source: str, names: dict[str, Any], runner: asyncio.Runner) -> str:
    """Execute one cell inside of a running loop, as a kernel does; return its error as text, or an empty string."""

    async def execute() -> None:
        coroutine = eval(_compiled(source, title, names), names)  # noqa: S307 - it is what a notebook does
        if inspect.iscoroutine(coroutine):  # the cell awaits something
            await coroutine

    try:
        remember(title, source)
        runner.run(execute())
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


def _compiled(source: str, title: str, names: dict[str, Any]) -> types.CodeType:
    """Compile a cell; one that is no Python becomes what IPython makes of it."""
    try:
        return _compile(source, title)
    except SyntaxError:
        with suppress(ModuleNotFoundError):
            python = _without_magics(source, names)
            remember(title, python)
            return _compile(python, title)
        raise


def _compile(source: str, title: str) -> types.CodeType:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return cast(types.CodeType, compile(source, title, "exec", flags=flags, dont_inherit=True))


def _without_magics(source: str, names: dict[str, Any]) -> str:
    """Return a cell with calls of IPython's shell in place of magics and shell lines; start that shell with `names`.

    Raises:
        ModuleNotFoundError: there is no IPython.
    """
    from IPython.core.inputtransformer2 import TransformerManager
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):  # type: ignore[misc]
        def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
            """Leave out what needs a notebook's window or another environment."""
            return None if magic_name in ELSEWHERE else super().run_line_magic(magic_name, line, _stack_depth + 1)

    python = TransformerManager().transform_cell(source)
    if "get_ipython()" in python:
        config = Config({"HistoryManager": {"enabled": False}})
        InteractiveShell.clear_instance()
        Shell.instance(user_module=sys.modules["__main__"], user_ns=names, config=config)
    return str(python)
