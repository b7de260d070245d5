"""The book's sources: table of contents, map, names in the text, symbols."""

import pkgutil
import re
from functools import cache
from pathlib import Path

import chapter_cells
import yaml
from scripts import load

import dualpipe_lab
from dualpipe_course.registry import topic
from dualpipe_course.workspace.contents import in_reading_order
from dualpipe_lab._facade import Facade, public_names

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "book"
PAGES = sorted(page for page in BOOK.rglob("*.md") if ".ipynb_checkpoints" not in page.parts)
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())


def toc_files(entry=TOC):
    """Every file of the table of contents, at any depth."""
    below = [child for key in ("parts", "chapters", "sections") for child in entry.get(key, [])]
    own = [entry[key] for key in ("root", "file") if key in entry]
    return own + [file for child in below for file in toc_files(child)]


def test_toc_lists_every_page_and_exercise_once_by_its_source():
    exercises = sorted((ROOT / "exercises").rglob("*.md"))
    assert sorted(toc_files()) == sorted(page.relative_to(ROOT).as_posix() for page in (*PAGES, *exercises))


def test_every_address_that_the_book_had_leads_somewhere():
    """A page that is renamed stays in the list and gets a line in `moved_pages` of _config.yml."""
    had = (BOOK / "addresses.txt").read_text().split()
    pages = {file.removesuffix(".md") for file in toc_files()}
    moved = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]["moved_pages"]
    assert set(had) - pages == set(moved)
    assert pages <= set(had), f"new pages for book/addresses.txt: {sorted(pages - set(had))}"
    assert had == sorted(set(had))


def needs(page):
    """The pages that a page's sentences with "You need" link to."""
    sentences = re.findall(r"^(?:Side track of .*?\. )?(You need .*?)(?=\. [A-Z]|\.?$)", page.read_text(), re.MULTILINE)
    links = [link for sentence in sentences for link in re.findall(r"\]\(([\w./-]+\.md)", sentence)]
    return [(page.parent / link).resolve().relative_to(ROOT).as_posix() for link in links]


def trail():
    """The chapters of the trail, in order."""
    return TOC["meta"]["trail"]


def test_a_part_has_the_pages_of_the_trail_first_then_those_of_the_lecture():
    """Each by its numbers; the lecture's are those of its table, in an order in which each needs only earlier ones."""
    first, second = trail(), TOC["meta"]["lecture"]
    for part in TOC["parts"]:
        files = [chapter["file"] for chapter in part["chapters"]]
        marks = [0 if file in first else 1 if file in second else 2 for file in files]
        assert marks == sorted(marks), part["caption"]
        inside = [file for file in files if file in first]
        assert inside == sorted(inside, key=first.index), part["caption"]
    table = load(ROOT / "tools" / "lecture_table.py").TABLE
    assert sorted(second) == sorted(f"book/{axis}/{page}.md" for axis, pages in table.items() for page in pages)
    for number, page in enumerate(second):
        assert set(needs(ROOT / page)) & set(second) <= set(second[:number]), page


def test_the_trail_is_short_and_needs_no_page_outside_itself():
    files = trail()
    assert len(files) <= 24
    for page in files:
        assert set(needs(ROOT / page)) <= set(files[: files.index(page)]), page
        marks = [about for about in exercises_of(page) if about.trail and about.kind != "part"]
        assert len(marks) <= 2, page


HIDDEN = {"remove-cell", "remove-input", "hide-input", "hide-cell"}


def visible_lines(cells):
    """The lines of code that a reader sees without a click."""
    shown = [cell.code for cell in cells if not HIDDEN & set(cell.tags)]
    return sum(bool(line.strip()) for code in shown for line in code.splitlines())


def test_a_page_of_the_trail_shows_few_lines_of_code_and_few_bars():
    for file in trail():
        cells = chapter_cells.cells(ROOT / file)
        assert visible_lines(cells) <= 60, file
        assert sum(bool({"hide-input", "hide-cell"} & set(cell.tags)) for cell in cells) <= 3, file


def test_the_trail_states_its_minutes_by_one_rule():
    """A minute for 100 words of the core, for 10 of its visible lines and for a formula, in steps of five."""
    for file in trail():
        text = (ROOT / file).read_text()
        core = re.split(r"^## (?:Going deeper|The same on GPUs)", text, maxsplit=1, flags=re.MULTILINE)[0]
        prose = chapter_cells.CELL.sub("", core.split("\n---\n", 1)[1])
        prose = re.sub(r"^:::\{admonition\}.*\n:class: dropdown\n[\s\S]*?^:::$", "", prose, flags=re.MULTILINE)
        num_words = len(re.sub(r"\]\([^)]*\)", "]", prose).split())
        cells = [cell for cell in chapter_cells.cells(ROOT / file) if cell.line <= core.count("\n")]
        minutes = num_words / 100 + visible_lines(cells) / 10 + prose.count("$$") / 2
        stated = int(re.search(r"Core (\d+) minutes", text)[1])
        assert abs(stated - minutes) <= 4, f"{file}: {minutes:.0f} minutes by the rule"


def exercises_of(page):
    """What is known of a chapter's exercises."""
    text = (ROOT / page.replace("book/", "exercises/", 1)).read_text() if is_exercised(page) else ""
    found = re.search(r"answer-(\w+)-\d+\b", text)
    return [check.about for check in topic(found[1])] if found else []


def is_exercised(page):
    """Whether a chapter has exercises."""
    return (ROOT / page.replace("book/", "exercises/", 1)).is_file()


def test_a_side_track_names_the_page_of_the_trail_that_it_leaves_from():
    pages = [chapter["file"] for part in TOC["parts"][:-2] for chapter in part["chapters"]]
    for page in set(pages) - set(trail()):
        if Path(page).name not in ("door.md", "paths.md"):
            link = re.search(r"^Side track of \[.*?\]\((.*?)\)", (ROOT / page).read_text(), re.MULTILINE)
            assert link, page
            assert ((ROOT / page).parent / link[1]).resolve().relative_to(ROOT).as_posix() in trail(), page


def test_what_a_page_needs_comes_before_it():
    files = [TOC["root"], *(f"{name}.md" for name in in_reading_order(TOC))]
    late = {
        page: [need for need in needs(ROOT / page) if files.index(need) > files.index(page)]
        for page in files
        if page.startswith("book/")
    }
    assert {page: pages for page, pages in late.items() if pages} == {}
    for path in re.findall(r"^(?:\d+\. .*\n)+", (BOOK / "paths.md").read_text(), re.MULTILINE):
        pages = [f"book/{page}" for page in re.findall(r"^\d+\. \[.*?\]\((.*?)\)", path, re.MULTILINE)]
        assert all(set(pages[number:]).isdisjoint(needs(ROOT / page)) for number, page in enumerate(pages)), path
    assert sum(bool(needs(ROOT / page)) for page in files) >= 50


def test_a_reading_path_takes_as_long_as_its_pages():
    for title, path in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", (BOOK / "paths.md").read_text(), re.MULTILINE):
        pages = re.findall(r"^\d+\. \[.*?\]\((.*?)\)", path, re.MULTILINE)
        minutes = [int(re.search(r"Core (\d+) minutes", (BOOK / page).read_text())[1]) for page in pages]
        assert not pages or int(re.search(r"\*(\d+) minutes", path)[1]) == sum(minutes), title


def test_every_cell_of_the_lecture_table_keeps_its_promises():
    """Chapter, notebook, real processes, exercises, backward, NCCL cell and widget."""
    tool = load(ROOT / "tools" / "lecture_table.py")
    rows = tool.table(ROOT)
    assert len(rows) == 37
    assert tool.broken(rows) == []


def test_a_page_with_code_has_the_header_that_makes_it_run_and_a_notebook():
    texts = {page: page.read_text() for page in PAGES}
    pages = [page for page, text in texts.items() if "{code-cell}" in text]
    assert len(pages) > 50
    assert [page.name for page in pages if "format_name: myst" not in texts[page][:400]] == []
    assert [page.name for page in pages if not page.with_suffix(".ipynb").exists()] == []


def test_every_link_to_a_heading_leads_to_one():
    """As GitHub and MyST name them: lower case, words joined, without other signs."""
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", page.read_text()):
            text = ((page.parent / target) if target else page).read_text()
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            names = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert anchor in names | set(re.findall(r"^\(([\w-]+)\)=", text, re.MULTILINE)), (page.name, target, anchor)


def names_in(page):
    """Every dualpipe_lab name that a page mentions in code: in cells, code spans and fences."""
    text = page.read_text()
    code = "\n".join(re.findall(r"```.*?```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    names = set(re.findall(r"\bdualpipe_lab(?:\.[A-Za-z_]\w*)+", code))
    names |= {f"dualpipe_lab.{name}" for name in re.findall(r"\blab\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", code)}
    for module, *lists in re.findall(r"from (dualpipe_lab[\w.]*) import (?:\(([^)]*)\)|([^(\n]+))", code):
        imported = "".join(lists)
        names |= {f"{module}.{name.split(' as ')[0].strip()}" for name in imported.split(",") if name.strip()}
    return sorted(names)


@cache
def exists(name):
    """Whether a dotted name is a module or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_library_name_in_the_text_exists():
    wrong = [f"{page.relative_to(BOOK)}: {name}" for page in PAGES for name in names_in(page) if not exists(name)]
    assert wrong == []


def test_every_part_has_a_page_in_the_reference():
    pages = [BOOK / "appendix" / "api.md", *sorted((BOOK / "appendix" / "api").glob("*.md"))]
    shown = [found for page in pages for found in re.findall(r"\.\. facade:: ([\w.]+)", page.read_text())]
    parts = [entry.name for entry in public_names("dualpipe_lab") if entry.module == "dualpipe_lab"]
    facades = {f"dualpipe_lab.{part}" for part in parts if isinstance(getattr(dualpipe_lab, part), Facade)}
    assert sorted(shown) == sorted({"dualpipe_lab", *facades})


def test_every_symbol_has_one_meaning():
    rows = re.findall(r"^\| (\S.*?) \|", (BOOK / "appendix" / "notation.md").read_text(), re.MULTILINE)
    cells = [row.strip("$").split(",") for row in rows if row != "Symbol" and not row.startswith("-")]
    symbols = [symbol.strip().strip("$") for cell in cells for symbol in cell]
    assert len(symbols) > 50
    assert sorted({symbol for symbol in symbols if symbols.count(symbol) > 1}) == []
    assert {"F", "B", "I", "W", "F&B", "p", "m", "t_F", r"\Psi", r"\beta"} <= set(symbols)


def test_tests_that_the_text_names_exist():
    known = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        assert set(re.findall(r"\btest_\w+\.py\b", page.read_text())) <= known, page
