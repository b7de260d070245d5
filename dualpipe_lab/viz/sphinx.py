"""A Sphinx extension: the pages of a book share one copy of the script instead of one copy per output.

In: pages whose outputs contain drawings, fresh or from the execution cache.  Out: the same pages without inline copies,
and a classic script under `_static`, or two where there is a studio; they work from file:// too.  Enable
it with `extensions: [dualpipe_lab.viz.sphinx]`; without it the pages work as well and are larger.
"""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from dualpipe_lab.viz.bundle import classic_script, element_script, element_script_name, script_name
from dualpipe_lab.viz.embed import ELEMENT_SCRIPT, element_scripts, has_elements, without_scripts


def write_script(app: Sphinx) -> None:
    """Write the scripts into the book's `_static` folder."""
    if app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / script_name()).write_text(classic_script(), encoding="utf-8")
    for name in ELEMENT_SCRIPT.values():
        (folder / element_script_name(name)).write_text(element_script(name), encoding="utf-8")


def share_script(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Replace the script copies of a page by a reference to the shared script, on pages with drawings."""
    body = context.get("body", "")
    if has_elements(body):
        context["body"] = without_scripts(body)
        app.add_js_file(script_name(), loading_method="defer")
    for name in element_scripts(body):
        app.add_js_file(element_script_name(name), loading_method="defer")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the two event handlers to Sphinx."""
    app.connect("builder-inited", write_script)
    app.connect("html-page-context", share_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
