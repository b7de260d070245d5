"""What the book needs from Sphinx beyond _config.yml: local mathematics, no widgets, no dead buttons.

In: the Sphinx application.  Out: three handlers on its events.
  config-inited       live cells make no widgets, which a published page could not show
  build-finished      MathJax is copied out of the installed sphinx-mathjax-offline package
  html-page-context   buttons that need the repository's address wait until _config.yml holds one
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ExtensionError

ADDRESS_PLACEHOLDER = "/ORG/"
# All that tex-chtml.js can load: the fonts, TeX packages on demand, and the readers that its menu offers.
MATHJAX_PARTS = ("tex-chtml.js", "output/chtml", "input/tex/extensions", "a11y", "sre")


def make_no_widgets(app: Sphinx, config: Config) -> None:
    """Tell the kernels that run the pages to show live cells without their widgets."""
    os.environ["DUALPIPE_LAB_STATIC"] = "1"


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Copy the parts of MathJax that the pages load, so that mathematics needs no network."""
    if error is not None or app.builder.format != "html":
        return
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None or spec.origin is None:
        raise ExtensionError("MathJax is missing: run `pip install -r requirements.txt` (sphinx-mathjax-offline)")
    source, target = Path(spec.origin).parent / "static" / "mathjax", Path(app.outdir) / "_static" / "mathjax"
    for part in MATHJAX_PARTS:
        (target / part).parent.mkdir(parents=True, exist_ok=True)
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, dirs_exist_ok=True)
        else:
            shutil.copy2(source / part, target / part)


def hide_dead_buttons(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Drop the repository, Binder and Colab buttons while the repository's address is a placeholder."""
    if ADDRESS_PLACEHOLDER in app.config.html_theme_options.get("repository_url", ""):
        dead = {"launch-buttons", "source-repository-button"}
        context["header_buttons"] = [b for b in context.get("header_buttons", []) if b.get("label") not in dead]


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers; the last one runs after the theme has made its buttons."""
    app.connect("config-inited", make_no_widgets)
    app.connect("build-finished", copy_mathjax)
    app.connect("html-page-context", hide_dead_buttons, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
