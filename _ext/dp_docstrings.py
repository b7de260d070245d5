"""Lets autodoc show the library's docstrings as they are written.

A module's docstring is one sentence, a few labelled lines (Chapter:, Source:) and small tables laid out with spaces.
Sphinx would read that layout as markup, so each label gets its own line and each table is shown as it stands.
A property's docstring is plain text; napoleon would take the words before a colon for its type.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.docstrings import prepare_docstring

_LABEL = re.compile(r"[A-Z]\w+: ")


def keep_layout(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Rewrite `lines`, the docstring of `obj`, in place."""
    if what == "module":
        lines[:] = list(_with_tables(lines))
    elif what == "property":
        lines[:] = prepare_docstring(obj.__doc__ or "")


def _with_tables(lines: list[str]) -> Iterator[str]:
    for is_table, group in groupby(lines, key=lambda line: line.startswith("  ")):
        if is_table:
            yield from ("", ".. code-block:: text", "", *(f"   {line[2:]}" for line in group), "")
        else:
            yield from _with_labels(group)


def _with_labels(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if _LABEL.match(line):
            yield ""
        yield line


def setup(app: Sphinx) -> dict[str, Any]:
    """Run after napoleon (priority 500), which knows the sections of functions and classes."""
    app.connect("autodoc-process-docstring", keep_layout, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
