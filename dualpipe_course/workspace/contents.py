"""The pages of the course in reading order, and where the learner's copy of each stands.

In: a checkout with _toc.yml, whose `meta` lists the trail and the lecture.  Out: parts with chapters; files sort by
name as the table of contents reads, and a page of the trail has its number:
  04-pipelines/13-gpipe.ipynb              a chapter of the trail
  04-pipelines/13b-gpipe-exercises.ipynb   its exercises
  04-pipelines/s02-pipedream.ipynb         a side track
  about/learners.md                        a page of a part without notebooks
"""

import json
import math
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
    """A chapter and, if it has them, its exercises; its number on the trail, and whether the lecture has it."""

    page: Page
    exercises: Page | None = None
    number: int | None = None
    in_lecture: bool = False


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

    def chapters(self) -> list[Chapter]:
        """Every chapter in reading order: the trail by its numbers, then the side tracks part by part."""
        every = [chapter for part in self.parts for chapter in part.chapters]
        return sorted(every, key=lambda chapter: chapter.number or math.inf)

    def pages(self) -> Iterator[Page]:
        """Every page that a learner gets, in reading order."""
        yield self.home
        for chapter in self.chapters():
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
    every = set(in_reading_order(table))
    digits = len(str(len(table["parts"])))
    parts: list[Part] = []
    texts: list[Page] = []
    for part in table["parts"]:
        names = [name for name in _files(part) if _is_given(course, name) and chapter_of(name) not in every]
        if any(_has_notebook(course, name) for name in names):
            folder = f"{len(parts) + 1:0{digits}}-{_slug(part['caption'])}"
            parts.append(Part(part["caption"], _chapters(course, folder, names, table)))
        else:
            texts += [_page(course, name, f"about/{Path(name).name}") for name in names]
    return Contents(_page(course, _bare(table["root"]), Path(table["root"]).stem), parts, texts)


def listed(table: dict[str, Any], name: str) -> list[str]:
    """Return the pages that the table's `meta` lists as the "trail" or the "lecture", without suffix."""
    return [_bare(page) for page in table.get("meta", {}).get(name, ())]


def in_reading_order(table: dict[str, Any]) -> list[str]:
    """Return every page, without suffix: the trail by its numbers, each chapter before its exercises, then the rest."""
    trail = listed(table, "trail")
    names = [name for part in table["parts"] for name in _files(part)]
    place = {name: number for number, name in enumerate(trail)}
    return sorted(names, key=lambda name: place.get(chapter_of(name) or name, len(trail)))


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


def _chapters(course: Path, folder: str, names: list[str], table: dict[str, Any]) -> list[Chapter]:
    trail, lecture = listed(table, "trail"), listed(table, "lecture")
    chapters, sides = [], 0
    for name in names:
        number = trail.index(name) + 1 if name in trail else None
        sides += number is None
        place = f"{folder}/{number:02}" if number else f"{folder}/s{sides:02}"
        chapters.append(Chapter(*_both(course, place, name), number, name in lecture))
    return chapters


def _both(course: Path, place: str, name: str) -> tuple[Page, Page | None]:
    """Return a chapter's page and that of its exercises."""
    stem = Path(name).name
    page, answers = _page(course, name, f"{place}-{stem}"), name.replace("book/", "exercises/", 1)
    if answers == name or not _has_notebook(course, answers):
        return page, None
    return page, _page(course, answers, f"{place}b-{stem}-exercises")


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
