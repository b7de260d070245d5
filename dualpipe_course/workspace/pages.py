"""One copy of a page: its notebook as the book shows it, before anything is run.

In: a page of a checkout.  Out: the bytes of the learner's file, and a digest of what is written in its cells.
Links lead to the other copies, cells that the book folds are folded, and those after a prediction; the outputs are
those of the last build (_build/jupyter_execute) if it ran the same code.  Exercises that ask for numbers get the
learner's own.
"""

import hashlib
import json
import os.path
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from dualpipe_course import personal
from dualpipe_course.workspace import own
from dualpipe_course.workspace.contents import Contents, Page

BUILT = Path("_build", "jupyter_execute")
INSTALL = "install"  # the cell for Colab: a copy has no use for it
HIDES_SOURCE = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
HIDES_OUTPUT = {"hide-output", "hide-cell", "remove-output", "remove-cell"}
GONE = {"remove-cell"}  # from the book
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)\.(?:md|ipynb)(?:#([^)\s]*))?\)")
_BLOCK = re.compile(
    r"^(?P<fence>:{3,})\{(?P<kind>[\w-]+)\} *(?P<title>.*)\n(?P<options>(?::[\w-]+:.*\n)*)"
    r"(?P<body>(?:(?!:{3,}).*\n)*?)(?P=fence) *$",
    re.MULTILINE,
)
_GLOSSARY = re.compile(r"^```\{glossary\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


class Copy(NamedTuple):
    """A copy as the course gives it out.

    Attributes:
        page, data, text: its page, its bytes, the digest of what is written in its cells.
        shows: whether it has outputs.
        is_work: whether somebody ran the page in the checkout: then the copy is that person's work.
    """

    page: Page
    data: bytes
    text: str
    shows: bool = False
    is_work: bool = False


class Copier:
    """Makes the copies of one checkout, with the numbers of a seed if there is one."""

    def __init__(self, course: Path, contents: Contents, seed: int | None = None) -> None:
        self.course, self.places = course, {page.source: page.place for page in contents.pages()}
        self.seed = seed

    def copy(self, page: Page) -> Copy:
        """Return the copy of a page."""
        if page.place.endswith(".md"):
            text = (self.course / f"{page.source}.md").read_text(encoding="utf-8")
            data = self._text(page, _HEADER.sub("", text)).encode()
            return Copy(page, data, text_of(data, page.place))
        notebook = json.loads((self.course / f"{page.source}.ipynb").read_bytes())
        notebook["cells"] = [cell for cell in notebook["cells"] if INSTALL not in _tags(cell)]
        is_work = _has_outputs(notebook)
        if not is_work:
            _take_outputs(notebook, self.course / BUILT / f"{page.source}.ipynb")
            if self.seed is not None:
                personal.personal(notebook, self.seed)
        is_locked = False
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                is_locked |= own.has_lock(text := "".join(cell["source"]))
                cell["source"] = self._text(page, text)
            else:
                _fold(cell, is_locked)
                is_locked &= bool(GONE & _tags(cell))
        kernel = {name: notebook["metadata"][name] for name in ("kernelspec",) if name in notebook["metadata"]}
        known = {"page": page.source, **notebook["metadata"].get("dualpipe_lab", {})}
        notebook["metadata"] = {**kernel, "dualpipe_lab": known}  # without jupytext's pairing
        data = json.dumps(notebook, indent=1, ensure_ascii=False).encode() + b"\n"
        return Copy(page, data, text_of(data, page.place), _has_outputs(notebook), is_work)

    def _text(self, page: Page, text: str) -> str:
        """Return Markdown that JupyterLab shows as the book does, with links to the other copies."""
        text = plain(own.quoted(self.course, page.source, text))
        return _LINK.sub(lambda found: self._link(page, *found.groups()), text)

    def _link(self, page: Page, words: str, target: str, anchor: str | None) -> str:
        name = os.path.normpath(f"{os.path.dirname(page.source)}/{target}")
        if name not in self.places:
            return words  # a page of the reference, which only the book has
        place = os.path.relpath(self.places[name], os.path.dirname(page.place) or ".")
        return f"[{words}]({place}{self._anchor(name, anchor) if anchor else ''})"

    def _anchor(self, name: str, anchor: str) -> str:
        """Return the anchor of a heading in JupyterLab's form, from the one in the book's."""
        text = (self.course / f"{name}.md").read_text(encoding="utf-8")
        for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
            if re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") == anchor:
                return "#" + quote(re.sub(r"[`*]", "", heading).replace(" ", "-"))
        return ""


def text_of(data: bytes, place: str) -> str:
    """Return the digest of what is written in a file: of its cells, not of their outputs; "" for no notebook."""
    if place.endswith(".md"):
        return hashlib.sha256(data).hexdigest()
    try:
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(data)["cells"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return hashlib.sha256(json.dumps(cells).encode("utf-8", "surrogatepass")).hexdigest()


def plain(text: str) -> str:
    r"""Return MyST's blocks in plain Markdown: a note as a quotation, a hidden answer as one that opens.

    >>> print(plain(":::{admonition} Takeaway\n:class: tip\nOne copy.\n:::"))
    > **Takeaway**
    >
    > One copy.
    """
    text, found = _GLOSSARY.sub(r"\1", text), 1
    while found:
        text, found = _BLOCK.subn(_plain_block, text)
    return text


def _plain_block(found: re.Match[str]) -> str:
    title, body = found["title"].strip(), found["body"].strip("\n")
    if "dropdown" in found["options"] or found["kind"] == "dropdown":
        return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
    if found["kind"] in ("grid", "table"):
        return body
    if found["kind"] in ("card", "grid-item-card"):
        return f"**{title}**\n\n{body}"
    lines = [f"**{title or found['kind'].capitalize()}**", "", *body.splitlines()]
    return "\n".join(f"> {line}".rstrip() for line in lines)


def _tags(cell: dict[str, Any]) -> set[str]:
    return set(cell["metadata"].get("tags", ()))


def _has_outputs(notebook: dict[str, Any]) -> bool:
    """Return whether a cell shows a result."""
    return any(cell.get("outputs") for cell in notebook["cells"])


def _fold(cell: dict[str, Any], is_locked: bool) -> None:
    """Fold in JupyterLab what the tags fold in the book, and what a prediction is about."""
    hidden = {"source_hidden": HIDES_SOURCE, "outputs_hidden": HIDES_OUTPUT}
    if folded := {name: True for name, tags in hidden.items() if is_locked or tags & _tags(cell)}:
        cell["metadata"]["jupyter"] = folded


def _take_outputs(notebook: dict[str, Any], built: Path) -> None:
    """Give a notebook the outputs of the build, unless the build ran other code or none."""
    try:
        cells = json.loads(built.read_bytes())["cells"]
    except (OSError, ValueError, KeyError):
        return
    made = [cell for cell in cells if cell["cell_type"] == "code" and INSTALL not in _tags(cell)]
    own = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if ["".join(cell["source"]) for cell in made] != ["".join(cell["source"]) for cell in own]:
        return
    for cell, done in zip(own, made, strict=True):  # without counts: no kernel has run them yet
        cell["outputs"] = [
            one | {"execution_count": None} if "execution_count" in one else one for one in done["outputs"]
        ]
