"""Reads and writes several pages at once: a page waits for its ranks more than half of the time.

In: the environment variable PAGES_AT_ONCE (`make book PAGES=2`).  Out: Sphinx's own setting, which jupyter-book has no
option for.  Sphinx deals out runs of neighbours, so the pages are shuffled: those with code stand side by side.
Times that a page measures are those of a busy machine then: for the book that is published, one page at a time.
"""

import os
from math import isqrt
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment

# Brought by jupyter-book, and silent about it: one numbers sections when all pages are read, one is for LaTeX.
UNDECLARED = {"sphinx_multitoc_numbering", "sphinx_jupyterbook_latex"}


def allow(app: Sphinx, config: Config) -> None:
    """Set the number of pages at once."""
    app.parallel = int(os.environ.get("PAGES_AT_ONCE", "1"))


def spread(app: Sphinx, env: BuildEnvironment, names: list[str]) -> None:
    """Put neighbours into different runs."""
    if app.parallel > 1:
        for extension in UNDECLARED & set(app.extensions):
            app.extensions[extension].parallel_read_safe = True
        step = isqrt(len(names)) or 1
        names[:] = [name for start in range(step) for name in names[start::step]]


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers."""
    app.connect("config-inited", allow)
    app.connect("env-before-read-docs", spread)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
