"""Naming a line of code as its author knows it: `Cell In[3], line 7, in step`."""

import linecache
import re
import site
import sys
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path

import dualpipe_lab
from dualpipe_lab.world.record.rank_status import StackFrame

_PACKAGE = str(Path(dualpipe_lab.__file__).parent)


def name_file(file: str) -> str:
    """`Cell In[3]` for a notebook cell, the file's own name otherwise."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    named = shell.compile.format_code_name(file) if shell and hasattr(shell.compile, "format_code_name") else None
    return " ".join(named) if named else Path(file).name


def name_frame(frame: StackFrame) -> str:
    """`Cell In[3], line 7, in step`."""
    return f"{name_file(frame.file)}, line {frame.line}, in {frame.function}"


def learners_frame(frames: Sequence[StackFrame], cells: Collection[str]) -> StackFrame | None:
    """The innermost line that the learner wrote: in a cell, else in a file of theirs, else any."""
    for wanted in (lambda file: file in cells, _is_own_file):
        found = next((frame for frame in reversed(frames) if wanted(frame.file)), None)
        if found:
            return found
    return frames[-1] if frames else None


def source_line(frame: StackFrame) -> str:
    """The text of the line, stripped; empty if it is not known here."""
    return linecache.getline(frame.file, frame.line).strip()


def name_cells(text: str, cells: Collection[str]) -> str:
    """Replace the file names of cells in a traceback by their names in the notebook."""
    named = {file: name_file(file) for file in cells if file in text}
    for file, name in named.items():
        text = text.replace(f'File "{file}"', name)
    return text


def frames_of_dump(text: str) -> list[StackFrame]:
    """The frames in the interpreter's own stack dump, innermost last."""
    found = re.findall(r'File "(.+?)", line (\d+) in (.+)', text)
    return [StackFrame(file, int(line), function) for file, line, function in reversed(found)]


def learners_stack(dump: str) -> str:
    """The part of the interpreter's dump of all threads that shows the learner's function and what it called."""
    headline, _, _ = dump.partition("\n\n")
    foundation = f'  File "{_PACKAGE}/world/rank.py"'
    for block in dump.split("\n\n"):
        stack, found, _ = block.partition(foundation)
        if found and "in _listen" not in block:
            return f"{headline}\n{stack.rstrip()}" if stack not in headline else stack.rstrip()
    return headline


def _is_own_file(file: str) -> bool:
    foreign = (_PACKAGE, sysconfig.get_paths()["stdlib"], *site.getsitepackages(), "<")
    return not file.startswith(foreign)
