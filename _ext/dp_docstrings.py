"""Shows the library's module pages in the reference as they are written.

A module's docstring is one sentence and then a small table of lines and formulas, laid out with spaces.  Sphinx would
read that layout as markup, so everything after the first paragraph is shown as it stands.
"""

from typing import Any

from sphinx.application import Sphinx


def keep_layout(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Turn a module's docstring, in place, into its first paragraph and a literal block."""
    if what != "module" or "" not in lines:
        return
    end = lines.index("")
    layout = [f"   {line}".rstrip() for line in lines[end + 1 :]]
    lines[:] = [*lines[:end], "", ".. code-block:: text", "", *layout, ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Read docstrings before napoleon does (priority 500)."""
    app.connect("autodoc-process-docstring", keep_layout, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
