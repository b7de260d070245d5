"""The pages of the course in reading order, and where the learner's copy of each stands.

In: a checkout with _toc.yml.  Out: parts with chapters; files sort by name as the table of contents reads:
  04-trail-pipelines/02-gpipe.ipynb              a chapter
  04-trail-pipelines/02b-gpipe-exercises.ipynb   its exercises
  about/learners.md                              a page of a part without notebooks
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualpipe_lab._optional import extra

CONTENTS = "_toc.yml"
REFERENCE = ("{eval-rst}", "{nb-exec-table}", "{include}")  # pages that only the book's builder can write
_HEADING = re.compile(r"^# +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """One page: its name in the course without suffix, the place of its copy, its title."""

    source: str
    place: str
    title: str


@dataclass(frozen=True)
class Chapter:
    """A chapter and, if it has them, its exercises."""

    page: Page
    exercises: Page | None = None


@dataclass(frozen=True)
class Part:
    """A part of the course: its caption and chapters."""

    caption: str
    chapters: list[Chapter]


@dataclass(frozen=True)
class Contents:
    """The course: its home page, its parts, and the pages of parts without notebooks."""

    home: Page
    parts: list[Part]
    texts: list[Page] = field(default_factory=list)

    def pages(self) -> Iterator[Page]:
        """Every page that a learner gets, in reading order."""
        yield self.home
        for part in self.parts:
            for chapter in part.chapters:
                yield chapter.page
                if chapter.exercises:
                    yield chapter.exercises
        yield from self.texts


def read(course: Path) -> Contents:
    """Return the contents of a checkout.

    Raises:
        ValueError: the folder is no checkout of the course.
    """
    if not (course / CONTENTS).is_file():
        raise ValueError(
            f"no notebooks in {course}: they are in the course's repository, not in the package; name a checkout: "
            "dualpipe-lab lab --course FOLDER"
        )
    with extra("book", "reading the table of contents"):
        import yaml
    table = yaml.safe_load((course / CONTENTS).read_text(encoding="utf-8"))
    listed = {name for part in table["parts"] for name in _files(part)}
    digits = len(str(len(table["parts"])))
    parts: list[Part] = []
    texts: list[Page] = []
    for part in table["parts"]:
        names = [name for name in _files(part) if _is_given(course, name) and chapter_of(name) not in listed]
        if any(_has_notebook(course, name) for name in names):
            folder = f"{len(parts) + 1:0{digits}}-{_slug(part['caption'])}"
            parts.append(Part(part["caption"], [_chapter(course, folder, *one) for one in enumerate(names, 1)]))
        else:
            texts += [_page(course, name, f"about/{Path(name).name}") for name in names]
    return Contents(_page(course, _bare(table["root"]), Path(table["root"]).stem), parts, texts)


def chapter_of(name: str) -> str:
    """Return the chapter to which a page of exercises belongs, and nothing for another page.

    >>> chapter_of("exercises/pp/gpipe"), chapter_of("book/pp/gpipe")
    ('book/pp/gpipe', '')
    """
    return f"book/{name.removeprefix('exercises/')}" if name.startswith("exercises/") else ""


def _files(entry: dict[str, Any]) -> Iterator[str]:
    if "file" in entry:
        yield _bare(entry["file"])
    for key in ("chapters", "sections"):
        for below in entry.get(key, ()):
            yield from _files(below)


def _chapter(course: Path, folder: str, number: int, name: str) -> Chapter:
    stem = Path(name).name
    page = _page(course, name, f"{folder}/{number:02}-{stem}")
    answers = name.replace("book/", "exercises/", 1)
    if answers == name or not _has_notebook(course, answers):
        return Chapter(page)
    return Chapter(page, _page(course, answers, f"{folder}/{number:02}b-{stem}-exercises"))


def _page(course: Path, name: str, place: str) -> Page:
    title = _HEADING.search((course / f"{name}.md").read_text(encoding="utf-8"))
    suffix = ".ipynb" if _has_notebook(course, name) else ".md"
    return Page(name, place + suffix, title[1] if title else Path(name).name)


def _has_notebook(course: Path, name: str) -> bool:
    return (course / f"{name}.ipynb").is_file()


def _is_given(course: Path, name: str) -> bool:
    """Whether a learner gets the page: it is there, and not written by the book's builder alone."""
    page = course / f"{name}.md"
    return page.is_file() and not any(mark in page.read_text(encoding="utf-8") for mark in REFERENCE)


def _bare(name: str) -> str:
    return re.sub(r"\.(md|ipynb)$", "", name)


def _slug(caption: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", caption.lower()).strip("-")


def tags_of(notebook: Path) -> list[str]:
    """Return the tags of a notebook's cells, in order; none for a file that is no notebook."""
    try:
        cells = json.loads(notebook.read_bytes())["cells"]
        return [str(tag) for cell in cells for tag in cell["metadata"].get("tags", ())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
