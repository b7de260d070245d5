"""The directive `facade`: a part of the library as a page, a table of contents first, then every public name.

In: the name of a package, as in `.. facade:: dualpipe_lab.dp`.  Out: its headings in teaching order; under each heading
the names with their first sentences; then their docstrings.  A module among the names brings its own names along.
"""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[1]))
from dualpipe_lab._facade import Facade, PublicName, first_sentence, public_names


def names_of(module: ModuleType) -> list[PublicName]:
    """Return what a package hands out: by its stub, else by its `__all__`."""
    if isinstance(module, Facade):
        return public_names(module.__name__)
    return [PublicName(name, module.__name__, "") for name in getattr(module, "__all__", ())]


def home_of(module: ModuleType, entry: PublicName) -> str:
    """Return the package that describes a name: the part that it comes from, if that part hands it out too."""
    part = sys.modules.get(".".join(entry.module.split(".")[:2]))
    known = isinstance(part, Facade) and any(other.name == entry.name for other in public_names(part.__name__))
    return part.__name__ if part is not None and known else module.__name__


def contents(module: ModuleType) -> Iterator[str]:
    """Yield a table per heading: names that link to their entries, and first sentences."""
    for heading, entries in groupby(names_of(module), key=lambda entry: entry.heading):
        if heading:
            yield from ("", f".. rubric:: {heading}", "")
        yield from ("", ".. list-table::", "   :widths: 30 70", "   :class: dp-contents", "")
        for entry in entries:
            value = getattr(module, entry.name)
            sentence = first_sentence(value) or (f"`{value!r}`" if len(repr(value)) < 80 else "")
            path = value.__name__ if isinstance(value, ModuleType) else f"{home_of(module, entry)}.{entry.name}"
            yield f"   * - :py:obj:`{entry.name} <{path}>`"
            yield f"     - {_as_rst(sentence)}"


def details(module: ModuleType) -> Iterator[str]:
    """Yield autodoc's directives for every name, and a section of its own for every module among them."""
    for entry in names_of(module):
        value, path = getattr(module, entry.name), f"{module.__name__}.{entry.name}"
        if isinstance(value, ModuleType) or home_of(module, entry) != module.__name__:
            continue
        if isinstance(value, type):
            yield from ("", f".. autoclass:: {path}", "   :members:", "")
        elif callable(value) and hasattr(value, "__doc__"):
            yield from ("", f".. autofunction:: {path}", "")
        else:
            yield from ("", f".. py:data:: {path}", "")
    for entry in names_of(module):
        value = getattr(module, entry.name)
        if isinstance(value, ModuleType) and not _has_a_page(value) and home_of(module, entry) == module.__name__:
            yield from ("", f".. rubric:: {entry.name}", f"   :name: {module.__name__}.{entry.name}", "")
            if names_of(value):
                yield from (f".. py:module:: {value.__name__}", "", _as_rst(first_sentence(value)), "")
                yield from (*contents(value), *details(value))
            else:
                yield from ("", f".. automodule:: {value.__name__}", "   :members:", "")


def _has_a_page(module: ModuleType) -> bool:
    return module.__name__.count(".") == 1 and isinstance(module, Facade)


def _as_rst(text: str) -> str:
    """Return a docstring's sentence as reStructuredText: code stays code, nothing else is markup."""
    pieces = text.replace("\\", "\\\\").split("`")
    for index, piece in enumerate(pieces):
        pieces[index] = f"\\ ``{piece}``\\ " if index % 2 else re.sub(r"([*|_])", r"\\\1", piece)
    return "".join(pieces)


class FacadeDirective(SphinxDirective):
    """`.. facade:: dualpipe_lab.dp`; to be used inside of `eval-rst`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write the page as reStructuredText and let Sphinx read it."""
        module = import_module(self.arguments[0])
        for entry in names_of(module):
            getattr(module, entry.name)  # every part is imported before anybody asks for a name's home
        lines = [f".. py:module:: {module.__name__}", "", *contents(module), "", *details(module)]
        found = nodes.container()
        self.state.nested_parse(StringList(lines, source=f"<{module.__name__}>"), self.content_offset, found)
        return list(found.children)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("facade", FacadeDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
