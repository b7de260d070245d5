"""The book's sources: table of contents, map, pairs, names in the text, and the Sphinx handlers."""

import importlib
import importlib.util
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jupytext
import pytest
import yaml

import dualpipe_lab

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "book"
PAGES = sorted(page for page in BOOK.rglob("*.md") if ".ipynb_checkpoints" not in page.parts)
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
TOPICS = """
data parallel|column-parallel|gradient checkpointing|ring all-reduce|all-to-all
DP gradients|row-parallel|PP basic|softmax|async all-to-all
distributed Adam|SwiGLU|GPipe|online softmax|top-k gradient
ZeRO-1|GQA|PipeDream|ring softmax|SMoE
ZeRO-2|LM head|Zero Bubble|FlashAttention-2|GShard
ZeRO-3|embedding|Easy-DualPipe|ring attention|1F1B basic
mixed-precision Adam|RMSNorm|DualPipe||1F1B overlap
IO: save and load|cross-entropy|||V3-MoE structure
"""


def load(path):
    """Import a script that lives outside the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def toc_files(entry=TOC):
    """Every file of the table of contents, at any depth."""
    below = [child for key in ("parts", "chapters", "sections") for child in entry.get(key, [])]
    own = [entry[key] for key in ("root", "file") if key in entry]
    return own + [file for child in below for file in toc_files(child)]


def test_toc_lists_every_page_once_by_its_source():
    files = toc_files()
    assert sorted(file for file in files if file.startswith("book/")) == [p.relative_to(ROOT).as_posix() for p in PAGES]
    assert all((ROOT / file).is_file() for file in files)
    assert len(set(files)) == len(files)


def test_toc_lists_every_exercise_and_no_other_page():
    exercises = [page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "exercises").rglob("*.md"))]
    assert sorted(file for file in toc_files() if not file.startswith("book/")) == exercises


def map_cells():
    """The cells of the map on the home page, row by row."""
    text = (BOOK / "intro.md").read_text()
    table = text[text.index(":class: dp-map") :]
    rows = [line for line in table[: table.index("\n:::")].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_map_holds_the_lecture_table():
    names = [[re.sub(r"\[(.*)\]\(.*\)", r"\1", cell) for cell in row] for row in map_cells()]
    assert names == [row.split("|") for row in TOPICS.strip().splitlines()]


def test_map_links_exactly_the_chapters_that_exist():
    linked = {match[1] for row in map_cells() for cell in row if (match := re.fullmatch(r"\[.*\]\((.*)\)", cell))}
    written = {file.removeprefix("book/") for file in toc_files() if re.match("book/(dp|tp|pp|cp|ep)/", file)}
    assert linked == written - {"pp/explorer.md"}  # a tool for all schedules, no topic of the map


@pytest.mark.parametrize("page", [page for page in PAGES if "{code-cell}" in page.read_text()], ids=lambda p: p.stem)
def test_a_page_with_code_has_the_header_that_makes_it_run(page):
    assert "format_name: myst" in page.read_text()[:400]
    assert page.with_suffix(".ipynb").exists()


def names_in(page):
    """Every dualpipe_lab name that a page mentions in code: in cells, code spans and fences."""
    text = page.read_text()
    code = "\n".join(re.findall(r"```.*?```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    names = set(re.findall(r"\bdualpipe_lab(?:\.[A-Za-z_]\w*)+", code))
    names |= {f"dualpipe_lab.{name}" for name in re.findall(r"\blab\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", code)}
    for module, imported in re.findall(r"from (dualpipe_lab[\w.]*) import \(?([^)\n]+)", code):
        names |= {f"{module}.{name.split(' as ')[0].strip()}" for name in imported.split(",") if name.strip()}
    return sorted(names)


def resolve(name):
    """Whether a dotted name is a module or an attribute of one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            target = getattr(target, part)
        return target
    raise AttributeError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_library_name_in_the_text_exists(page):
    for name in names_in(page):
        resolve(name)


def test_the_check_of_names_sees_a_wrong_one(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Call `lab.launch` or `lab.lunch`.\n```python\nfrom dualpipe_lab import Program, Pogrom\n```\n")
    assert names_in(page) == [f"dualpipe_lab.{name}" for name in ("Pogrom", "Program", "launch", "lunch")]
    with pytest.raises(AttributeError):
        resolve("dualpipe_lab.lunch")


def test_every_public_name_is_in_the_reference():
    modules = re.findall(r"auto(?:module|function):: (dualpipe_lab[\w.]*)", (BOOK / "appendix" / "api.md").read_text())
    homes = {getattr(dualpipe_lab, name).__module__ for name in dualpipe_lab._HOMES}
    missing = {home for home in homes if not any(module.startswith(home) for module in modules)}
    assert missing == set()


def notation_symbols():
    text = (BOOK / "appendix" / "notation.md").read_text()
    rows = re.findall(r"^\| (\S.*?) \|", text, re.MULTILINE)
    symbols = [row.strip("$").split(",") for row in rows if row not in ("Symbol",) and not row.startswith("-")]
    return [symbol.strip().strip("$") for row in symbols for symbol in row]


def test_every_symbol_has_one_meaning():
    symbols = notation_symbols()
    assert len(symbols) > 50
    assert sorted({symbol for symbol in symbols if symbols.count(symbol) > 1}) == []
    assert {"F", "B", "I", "W", "F&B", "p", "m", "t_F", r"\Psi", r"\beta"} <= set(symbols)


# ---- pairs


@pytest.fixture
def check(monkeypatch, capsys):
    """Run the pair check in a folder; return its exit status and what it printed."""
    main = load(ROOT / "tools" / "check_pairs.py").main

    def run(folder):
        monkeypatch.chdir(folder)
        status = main([])
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def pair(tmp_path):
    """A folder with one page and its notebook that agree."""
    (tmp_path / "book").mkdir()
    for suffix in (".md", ".ipynb"):
        shutil.copy(BOOK / f"intro{suffix}", tmp_path / "book")
    return tmp_path / "book" / "intro.md"


def test_the_book_s_pairs_agree(check):
    status, printed = check(ROOT)
    assert status == 0, printed


def change_text(page):
    page.write_text(page.read_text().replace("takes distributed training apart", "takes it apart"))
    return "cell 0 (markdown, '# DualPipe Lab'): its text differs"


def change_tags(page):
    page.write_text(page.read_text().replace("[hide-input, ", "["))
    return "cell 2 (code, 'import json'): its tags differs"


def change_kind(page):
    page.write_text(
        page.read_text().replace("```{code-cell} ipython3\n:tags: [hide-input, full-width, dp-whole]", "```")
    )
    return "cell 2 (markdown, '```'): its kind differs"


def add_a_cell(page):
    page.write_text(page.read_text() + "\n+++\n\nMore.\n")
    return "has 5 cells, its notebook 4"


def remove_the_notebook(page):
    page.with_suffix(".ipynb").unlink()
    return "has no notebook beside it"


def remove_the_page(page):
    page.unlink()
    return "has no .md page"


def store_an_output(page):
    notebook = jupytext.read(page.with_suffix(".ipynb"))
    notebook.cells[1]["execution_count"] = 3
    jupytext.write(notebook, page.with_suffix(".ipynb"))
    return "carries outputs"


CHANGES = [change_text, change_tags, change_kind, add_a_cell, remove_the_notebook, remove_the_page, store_an_output]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_drift_is_named_with_its_remedy_and_nothing_is_written(check, pair, change):
    assert check(pair.parents[1])[0] == 0
    message = change(pair)
    before = {path: path.read_bytes() for path in pair.parent.iterdir()}
    status, printed = check(pair.parents[1])
    assert status == 1
    assert message in printed
    assert "make pairs" in printed
    assert {path: path.read_bytes() for path in pair.parent.iterdir()} == before


# ---- Sphinx handlers


def test_the_cache_key_follows_the_library_and_the_lock_file(tmp_path):
    digest = load(ROOT / "_ext" / "dp_book.py").library_digest
    (tmp_path / "dualpipe_lab" / "__pycache__").mkdir(parents=True)
    seen = [digest(tmp_path)]
    for name in ("dualpipe_lab/a.py", "dualpipe_lab/viz.mjs", "requirements.txt"):
        (tmp_path / name).write_text("one")
        seen.append(digest(tmp_path))
        (tmp_path / name).write_text("two")
        seen.append(digest(tmp_path))
    assert len(set(seen)) == len(seen)
    (tmp_path / "dualpipe_lab" / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "README.md").write_text("x")
    assert digest(tmp_path) == seen[-1]


@pytest.mark.parametrize(("address", "left"), [("https://github.com/ORG/x", 1), ("https://github.com/someone/x", 3)])
def test_buttons_wait_for_the_repository_s_address(address, left):
    buttons = [{"label": name} for name in ("launch-buttons", "source-repository-button", "download-buttons")]
    context = {"header_buttons": buttons}
    app = SimpleNamespace(config=SimpleNamespace(html_theme_options={"repository_url": address}))
    load(ROOT / "_ext" / "dp_book.py").hide_dead_buttons(app, "page", "page.html", context, None)
    assert len(context["header_buttons"]) == left


def test_a_module_s_tables_are_shown_as_they_are():
    keep_layout = load(ROOT / "_ext" / "dp_docstrings.py").keep_layout
    lines = ["What it is.", "", "Chapter: one.", "  a   1", "  b   2", "Source: a paper."]
    keep_layout(None, "module", "m", None, None, lines)
    table = [".. code-block:: text", "", "   a   1", "   b   2", ""]
    assert lines == ["What it is.", "", "", "Chapter: one.", "", *table, "", "Source: a paper."]
