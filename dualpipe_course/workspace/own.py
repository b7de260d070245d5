"""What pages say of the parts of a learner's trainer, in the book and in the copies of its pages.

In: a checkout, a part, the text of a page.  Out: Markdown in place of three directives of the book (`_ext/dp_own.py`):
  write   the box that asks for a part becomes a quotation with a link to the part's exercise
  ours    the course's own text becomes a fold
  lock    a prediction becomes a quotation; the next code cell is folded (`pages.py`)
"""

import ast
import io
import os.path
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

from dualpipe_course.exercise import About
from dualpipe_course.own.parts import PARTS
from dualpipe_course.registry import TOPICS, topic

_BLOCK = re.compile(
    r"^(?P<fence>:{3,}|`{3,})\{(?P<kind>write|ours|lock)\} +(?P<title>.+)\n(?P<body>(?:.*\n)*?)(?P=fence) *$",
    re.MULTILINE,
)
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LOCK, NEXT_CELL = "A guess first", "*The next cell is folded: guess, then open it.*"


class Exercise(NamedTuple):
    """Where a part is written.

    Attributes:
        page: the page of exercises, without suffix; "" if there is none.
        heading: the part's heading there, or "".
        about: what is known of it, if the part has a check already.
    """

    page: str
    heading: str
    about: About | None


def exercise_of(root: Path, part: str) -> Exercise:
    """Return the exercise of a part."""
    of = PARTS[part]
    if of not in TOPICS:
        return Exercise("", "", None)
    about = next((check.about for check in topic(of) if getattr(check, "part", "") == part), None)
    for path in sorted((root / "exercises" / TOPICS[of].partition(".")[0]).glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if re.search(rf"\banswer-{of}-\d", text):
            heading = re.search(rf"^## (Part `{part}`.*?) *$", text, re.MULTILINE)
            page = path.relative_to(root).with_suffix("").as_posix()
            return Exercise(page, heading[1] if heading else "", about)
    return Exercise("", "", about)


def title_of(part: str) -> str:
    """Return the title of the box that asks for a part."""
    return f"Now you write it: `mine/{part}.py`"


def way_to(exercise: Exercise, part: str, page: str, where: str = "") -> str:
    """Return the last line of that box on a page: a link to the exercise, its minutes, and where it is worked on."""
    about = exercise.about
    words = about.title if about else f"part `{part}`"
    if exercise.page:
        anchor = re.sub(r"[^\w\- ]", "", exercise.heading.lower()).replace(" ", "-")
        target = os.path.relpath(exercise.page, os.path.dirname(page) or ".") + ".md"
        words = f"[{words}]({target}{'#' if anchor else ''}{anchor})"
    minutes = f", {about.minutes} minutes" if about else ""
    return f"The exercise: {words}{minutes}{where}."


def ours(root: Path, part: str, title: str = "") -> tuple[str, str]:
    """Return the title of the course's own text of a part, and the text."""
    text = (root / "dualpipe_ours" / f"{part}.py").read_text(encoding="utf-8").rstrip()
    return f"Ours: {title or part}, {code_lines(text)} lines", text


def code_lines(text: str) -> int:
    r'''Count the lines of code: no blank ones, no comments, no docstrings.

    >>> code_lines('"""What it is."""\n\n# why\nx = [\n    1,  # one\n]\n')
    3
    '''
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    docs = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    words = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _NO_CODE]
    found = {line for word in words for line in range(word.start[0], word.end[0] + 1)}
    return len(found.difference(*(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1) for doc in docs)))


def has_lock(text: str) -> bool:
    """Return whether a text holds a prediction, which folds the next code cell."""
    return any(found["kind"] == "lock" for found in _BLOCK.finditer(text))


def quoted(root: Path, page: str, text: str) -> str:
    """Return the text of a page with plain Markdown in place of the three directives."""

    def plain(found: re.Match[str]) -> str:
        title, body = found["title"].strip(), found["body"].strip()
        if found["kind"] == "ours":
            part, _, words = title.partition(" ")
            summary, code = ours(root, part, words.strip())
            return f"<details><summary>{summary}</summary>\n\n```python\n{code}\n```\n\n</details>"
        head, last = LOCK, NEXT_CELL
        if found["kind"] == "write":
            head, last = title_of(title), way_to(exercise_of(root, title), title, page)
        lines = [f"**{head}**", "", *body.splitlines(), *([""] if body else []), last]
        return "\n".join(f"> {line}".rstrip() for line in lines)

    return _BLOCK.sub(plain, text)
