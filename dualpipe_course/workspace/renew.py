"""Make and renew a learner's copies; nothing that the learner wrote is overwritten or removed.

In: a checkout and a workspace.  Out: the copies, and one sentence for each thing that the learner should know.
  nobody touched it       the new version takes its place
  run, not edited         the same, and the run goes to `old/` with its date
  edited                  stays; the new version stands beside it as NAME.new.ipynb
  deleted or renamed      the copy is made again; a renamed file is the learner's own
  moved in the course     the file moves along, edited or not
  gone from the course    an untouched copy goes, an edited one stays
"""

import difflib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dualpipe_course import record
from dualpipe_course.own import folder as own
from dualpipe_course.retired import page_of
from dualpipe_course.workspace import contents, start_page
from dualpipe_course.workspace.contents import Contents, Page
from dualpipe_course.workspace.given import Folder, Given, digest
from dualpipe_course.workspace.pages import Copier, Copy, text_of

TUTOR = Page("AGENTS.md", "AGENTS.md", "You are a tutor here")  # for coding assistants: from tutor.md, beside this file
NEW = "@new"  # ends the name of an entry whose file stands beside an edited one
REFRESH = "if it is open in JupyterLab: File, Reload Notebook from Disk"
Sign = Callable[[Path, bytes], None]


@dataclass
class Report:
    """What a renewal did: sentences for the learner, whether it was the first, the copies, and those with outputs."""

    lines: list[str] = field(default_factory=list)
    is_first: bool = False
    num_copies: int = 0
    num_shown: int = 0


def renew(course: Path, path: Path, sign: Sign = lambda path, data: None) -> Report:
    """Bring the copies in the folder `path` up to date with a checkout.

    `sign` is told of each notebook that is written, so that JupyterLab may trust its outputs.

    Raises:
        ValueError: the checkout has no table of contents.
        OSError: the folder cannot be written.
    """
    table, folder, report = contents.read(course), Folder(path), Report()
    with folder.locked():
        report.is_first = not folder.given
        if report.is_first and record.seed(path) is None:  # who has copies keeps the numbers that are in them
            folder.write(f"{record.FOLDER}/{record.SEED}", f"{1 + secrets.randbelow(record.MAX_SEED)}\n".encode())
        copier = Copier(course, table, record.seed(path))
        try:
            for page in table.pages():
                copy = copier.copy(page)
                report.num_copies += 1
                report.num_shown += copy.shows
                _Renewal(folder, report, sign).one(copy)
            _Renewal(folder, report, sign).one(_tutor())
            own.make(path)
            _take_back(folder, table, report)
            if report.is_first:
                _adopt_progress(course, path)
            start_page.write(folder, table, report.lines, report.num_shown > 0)
        finally:
            folder.save()  # whatever stopped the renewal: what was given out is known
    return report


def fresh(course: Path, path: Path, chapter: str, sign: Sign = lambda path, data: None) -> Report:
    """Give a chapter out again; the learner's file goes to `old/` with its date.

    `chapter` is the name of a copy, such as `gpipe`, `pp/gpipe` or `gpipe-exercises`.

    Raises:
        ValueError: no copy has that name.
    """
    table, folder, report = contents.read(course), Folder(path), Report()
    page = _named(table, chapter)
    with folder.locked():
        place = folder.given[page.source].place if page.source in folder.given else page.place
        if folder.read(place) is not None:
            report.lines.append(f"{place} is kept as {folder.keep(place)}")
        copy = Copier(course, table, record.seed(path)).copy(page)
        folder.give(page.source, place, copy.data, "" if copy.is_work else copy.text)
        sign(path, copy.data)
        if page.source + NEW in folder.given:
            folder.take_back(page.source + NEW)
        folder.save()
        report.lines.append(f"{place} is as the course gives it out; {REFRESH}")
    return report


@dataclass
class _Renewal:
    """What the renewal of one copy needs."""

    folder: Folder
    report: Report
    sign: Sign

    def one(self, copy: Copy) -> None:
        """Renew one copy by the table above."""
        name, place = copy.page.source, self._place(copy.page)
        given, data = self.folder.given.get(name), self.folder.read(place)
        if data is None or (given and given.text and digest(data) == given.data):
            if data != copy.data:
                self._give(name, place, copy)
            return
        text = text_of(data, place)
        if text == copy.text:  # the learner has this version, perhaps with other results
            if not copy.is_work:
                self.folder.given[name] = Given(place, digest(data) if data == copy.data else "", text)
            self._withdraw(name)
        elif given and given.text == text:
            old = self.folder.keep(place)
            self._give(name, place, copy)
            self.report.lines.append(f"{place} is renewed; what you ran is {old}")
        elif not (given and given.text == copy.text):
            self._offer(copy, place)

    def _place(self, page: Page) -> str:
        """Return where a copy stands, after it has followed its page to another place in the course."""
        for name, to in ((page.source, page.place), (page.source + NEW, _beside(page.place))):
            given = self.folder.given.get(name)
            if given is None or given.place == to or (data := self.folder.read(given.place)) is None:
                continue
            if (self.folder.path / to).exists():  # a file of the learner's
                continue
            self.folder.move(given.place, to)
            self.folder.given[name] = replace(given, place=to)
            if digest(data) != given.data:
                self.report.lines.append(f"{given.place} is now {to}, as the course has a new order")
        given = self.folder.given.get(page.source)
        return given.place if given and self.folder.read(given.place) is not None else page.place

    def _give(self, name: str, place: str, copy: Copy) -> None:
        if name not in self.folder.given and not self.report.is_first:
            self.report.lines.append(f"{place} is new")
        if (self.folder.path / place).is_dir():
            place = self.folder.free(place)
        self.folder.give(name, place, copy.data, "" if copy.is_work else copy.text)
        if copy.shows:
            self.sign(self.folder.path, copy.data)

    def _offer(self, copy: Copy, place: str) -> None:
        """Put the course's version beside the learner's, once."""
        name = copy.page.source + NEW
        offered = self.folder.given.get(name)
        if offered and offered.text == copy.text:
            return
        self._withdraw(copy.page.source)
        beside = self.folder.free(_beside(place))
        self.folder.give(name, beside, copy.data, copy.text)
        if copy.shows:
            self.sign(self.folder.path, copy.data)
        self.report.lines.append(f"{place} is yours and stays; the course's new version is {beside}")

    def _withdraw(self, name: str) -> None:
        if name + NEW in self.folder.given:
            self.folder.take_back(name + NEW)


def _tutor() -> Copy:
    data = Path(__file__).with_name("tutor.md").read_bytes()
    return Copy(TUTOR, data, text_of(data, TUTOR.place))


def _beside(place: str) -> str:
    """Return the place of a new version beside an edited one.

    >>> _beside("4-pipeline/02-gpipe.ipynb")
    '4-pipeline/02-gpipe.new.ipynb'
    """
    path = Path(place)
    return path.with_name(f"{path.stem}.new{path.suffix}").as_posix()


def _take_back(folder: Folder, table: Contents, report: Report) -> None:
    """Remove the untouched copies of pages that the course no longer has."""
    known = {TUTOR.source, start_page.NAME, *(page.source for page in table.pages())}
    for name in [name for name in folder.given if name.removesuffix(NEW) not in known]:
        place = folder.given[name].place
        if folder.take_back(name):
            report.lines.append(f"{place} is no longer in the course; your file stays")
        folder.tidy(place)


def _named(table: Contents, chapter: str) -> Page:
    """Return the page that a learner means; ValueError if there is none, or more than one."""
    names: dict[str, list[Page]] = {}
    for page in table.pages():
        short = re.sub(r"^s?\d+b?-", "", Path(page.place).stem)
        for name in {page.place, page.source, page.source.partition("/")[2], short}:
            names.setdefault(name, []).append(page)
    found = names.get(chapter, [])
    if len(found) > 1 and (pages := [page for page in found if page.source.startswith("book/")]):
        found = pages  # exercises have the name of their chapter, after their folder's
    if not found and (left := page_of(Path(chapter).stem.removesuffix("-exercises"))):
        raise ValueError(f"{chapter!r} is no longer in the course; what it was about is in {left}")
    if len(found) != 1:
        near = [page.source for page in found] or difflib.get_close_matches(chapter, names, n=3)
        problem = "several chapters are called" if found else "no chapter is called"
        raise ValueError(f"{problem} {chapter!r}; choose {', '.join(near) or 'one of _toc.yml'}")
    return found[0]


def _adopt_progress(course: Path, path: Path) -> None:
    """Take over what was solved in the checkout itself, before there were copies."""
    for saved in sorted((course / "exercises").glob(f"*/{record.FOLDER}/{record.FILE}")):
        record.merge(record.load(saved.parents[1]), path)
