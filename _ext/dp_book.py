"""What the book needs from Sphinx beyond _config.yml: no widgets, no dead buttons.

In: the Sphinx application.  Out: two handlers on its events.
  config-inited       live cells make no widgets, which a published page could not show
  html-page-context   buttons that need the repository's address wait until _config.yml holds one
"""

import os
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

ADDRESS_PLACEHOLDER = "/ORG/"


def make_no_widgets(app: Sphinx, config: Config) -> None:
    """Tell the kernels that run the pages to show live cells without their widgets."""
    os.environ["DUALPIPE_LAB_STATIC"] = "1"


def hide_dead_buttons(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Drop the repository, Binder and Colab buttons while the repository's address is a placeholder."""
    if ADDRESS_PLACEHOLDER in app.config.html_theme_options.get("repository_url", ""):
        dead = {"launch-buttons", "source-repository-button"}
        context["header_buttons"] = [b for b in context.get("header_buttons", []) if b.get("label") not in dead]


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers; the last one runs after the theme has made its buttons."""
    app.connect("config-inited", make_no_widgets)
    app.connect("html-page-context", hide_dead_buttons, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
