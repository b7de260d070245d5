"""The learner's own trainer on a page: the box that asks for a part, the course's text in a fold, predictions.

In: three directives.
  :::{write} zero1                  Now you write it: mine/zero1.py; with the minutes and a link to the exercise
  ```{ours} zero1 ZeRO-1's step     Ours: ZeRO-1's step, 24 lines; the text of dualpipe_ours/zero1.py, folded
  :::{lock} zero1-bytes             a question; the next code cell's output is folded until a guess, by script alone
Out: their HTML, and _static/own.js on pages with folds or predictions.  A page is read again when its part's exercise
or the course's text of it changes.  Printed pages show everything.
"""

import re
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from dp_exercises import in_page
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

FOLDS = re.compile(r'class="[^"]*\bdp-(?:ours|lock)\b')
LOG = logging.getLogger(__name__)


class _OfPart(SphinxDirective):
    """A directive whose first word is a part."""

    required_arguments = 1

    def part(self) -> str:
        """Return it, or stop with the names of all."""
        from dualpipe_course.own.parts import PARTS

        if self.arguments[0] not in PARTS:
            raise self.error(f"there is no part {self.arguments[0]!r}; parts are {', '.join(PARTS)}")
        return str(self.arguments[0])

    @property
    def root(self) -> Path:
        """The course."""
        return Path(self.env.srcdir)


class Write(_OfPart):
    """The box that asks for a part."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the box: its title, what the page says, and the way to the exercise."""
        from dualpipe_course.workspace.own import exercise_of, title_of, way_to

        part = self.part()
        exercise = exercise_of(self.root, part)
        where = ""
        if exercise.about:
            is_pure = exercise.about.name in in_page(self.root)
            where = ", written in that page or in the notebook" if is_pure else ", worked on in the notebook"
        for file in ("_ext/in_page.txt", *([f"{exercise.page}.md"] if exercise.page else [])):
            self.env.note_dependency(str(self.root / file))
        title = nodes.title("", "", *self.parse_inline(title_of(part))[0])
        lines = [*self.content, "", way_to(exercise, part, self.env.docname, where)]
        box = nodes.admonition("", title, classes=["dp-write"])
        self.state.nested_parse(StringList(lines, "write"), self.content_offset, box)
        return [box]


class Ours(_OfPart):
    """The course's text of a part, folded."""

    optional_arguments, final_argument_whitespace = 1, True

    def run(self) -> list[nodes.Node]:
        """Return the code between the ends of its fold."""
        from dualpipe_course.workspace.own import ours

        part = self.part()
        self.env.note_dependency(str(self.root / "dualpipe_ours" / f"{part}.py"))
        summary, text = ours(self.root, part, *self.arguments[1:])
        opened = f'<details class="dp-ours"><summary>{escape(summary)}</summary>'
        code = nodes.literal_block(text, text, language="python")
        return [nodes.raw("", opened, format="html"), code, nodes.raw("", "</details>", format="html")]


class Lock(SphinxDirective):
    """A prediction."""

    required_arguments, has_content = 1, True

    def run(self) -> list[nodes.Node]:
        """Return the question in a box, whose id is the prediction's name."""
        from dualpipe_course.workspace.own import LOCK

        name = nodes.make_id(f"lock-{self.arguments[0]}")
        box = nodes.admonition("", nodes.title("", LOCK), classes=["dp-lock"], ids=[name])
        self.set_source_info(box)
        self.state.nested_parse(self.content, self.content_offset, box)
        return [box]


def check_locks(app: Sphinx, doctree: nodes.document) -> None:
    """Warn of a prediction whose next code cell shows nothing, so that there is nothing to guess."""
    waiting: nodes.Element | None = None
    for node in doctree.findall(nodes.Element):
        is_lock, is_cell = "dp-lock" in node.get("classes", ()), node.get("nb_element") == "cell_code"
        parts = [child.get("nb_element") for child in node.findall(nodes.container)] if is_cell else []
        if waiting is not None and "cell_code_output" not in parts and (is_lock or is_cell):
            LOG.warning("the code cell after this prediction shows nothing", location=waiting)
        if is_lock or is_cell:
            waiting = node if is_lock else None
    if waiting is not None:
        LOG.warning("no code cell comes after this prediction", location=waiting)


def add_script(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Load what keeps guesses, where there is something to open."""
    if FOLDS.search(context.get("body", "")):
        app.add_js_file("own.js", loading_method="defer")


def write_script(app: Sphinx, error: Exception | None) -> None:
    """Write the script, with what a browser keeps in it."""
    if error is None and app.builder.format == "html":
        from dualpipe_lab.viz.bundle import store_script

        script = Path(__file__).with_name("own.js").read_text(encoding="utf-8")
        Path(app.outdir, "_static", "own.js").write_text(store_script() + script, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives and connect the handlers."""
    app.add_directive("write", Write)
    app.add_directive("ours", Ours)
    app.add_directive("lock", Lock)
    app.connect("doctree-read", check_locks)
    app.connect("html-page-context", add_script)
    app.connect("build-finished", write_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
