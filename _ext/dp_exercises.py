"""Python for the browser: exercises that can be answered in their page, cells to edit and run, the studio's verdicts.

In: the notebooks, the names in in_page.txt, the tag `run` of cells whose text asks to change them, npm.  Out: a first
line that says how an exercise page is worked on, and of each exercise where; JSON in each page with exercises or such
cells; _static/progress.js, which says in all pages what is solved; and _static/python with Pyodide, the library and the
checks, compressed.  Without npm the lines alone.
"""

import ast
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from copy import copy
from functools import cache
from html import escape
from pathlib import Path
from symtable import symtable
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

PYODIDE, DIGEST = (
    "314.0.7",
    "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0",
)  # of npm's archive, sha256
PACKED = ("pyodide.asm.wasm", "pyodide.asm.mjs", "python_stdlib.zip")
PARTS = "dualpipe_ours"  # of the trainer: read as texts, whatever they import
LEFT_OUT = ("grading", "workspace", "static", "cli")  # of the library and the course
NEEDS_TORCH = re.compile(r"^(?:import|from) torch\b", re.MULTILINE)
# in a page's HTML: what asks Python
ASKS = re.compile(r'id="dp-(?:exercises|runs)"|<dp-studio |<dp-planner |<dp-live [^>]*"asks":')
RUN = re.compile(r'class="cell[^"]* tag_run[ "]')
ANSWER = re.compile(r'class="cell[^"]* tag_answer-([\w-]+)[ "]')
LOG = logging.getLogger(__name__)


def in_page(root: Path) -> list[str]:
    """Return the names of the exercises whose checks need neither torch nor ranks."""
    return (root / "_ext" / "in_page.txt").read_text(encoding="utf-8").split()


def cells_of(notebook: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Return what an exercise page needs to judge its answers: the cells before each, its starter and its check."""
    found: dict[str, dict[str, Any]] = {}
    before: list[str] = []
    starter = ""
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        tags = cell["metadata"].get("tags", [])
        name = next((tag.partition("-")[2] for tag in tags if tag.startswith(("answer-", "check-"))), None)
        if name is None:
            before.append(source)
        elif f"answer-{name}" in tags:
            starter = source
        elif name in names:
            given = [text for text in before if "google.colab" not in text]
            found[name] = {"before": given, "starter": starter, "check": source}
    return found


def solutions_of(notebook: dict[str, Any]) -> dict[str, str]:
    r"""Return the answers of a solution by exercise, without the marks from which the exercise is made.

    >>> source = "### BEGIN SOLUTION\nx = 1\n### STUB\n# x = ...\n### END SOLUTION\n"
    >>> solutions_of({"cells": [{"metadata": {"tags": ["answer-gpipe-1"]}, "source": source}]})
    {'gpipe-1': 'x = 1'}
    """
    from dualpipe_course.solved import without_marks

    return {
        tag.removeprefix("answer-"): without_marks("".join(cell["source"]))
        for cell in notebook["cells"]
        for tag in cell["metadata"].get("tags", [])
        if tag.startswith("answer-")
    }


@cache
def copies(root: Path) -> dict[str, str]:
    """Return the place of each exercise page in a learner's folder."""
    from dualpipe_course.workspace.contents import read

    return {page.source: page.place for page in read(root).pages()}


def add_exercises(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Write the first line of an exercise page and the JSON of its exercises, and load what reads it."""
    source = Path(app.srcdir, f"{page}.ipynb")
    if not page.startswith("exercises/") or not source.is_file():
        return
    copy = escape(copies(Path(app.srcdir))[page])
    how = f"To work on it in JupyterLab: <code>make lab</code>, then <code>{copy}</code>."
    names = in_page(Path(app.srcdir)) if app.config.has_python else []
    body = context["body"].replace("</h1>", f'</h1>\n<p class="dp-in-page">{how}</p>', 1)
    context["body"] = "".join(marked(part, names) for part in re.split("(?=<h2>)", body))
    if not names:
        return
    from dualpipe_course.registry import find

    exercises = cells_of(json.loads(source.read_text(encoding="utf-8")), names)
    solution = Path(app.srcdir, "solutions", *Path(page).parts[1:], source.name)
    solved = solutions_of(json.loads(solution.read_text(encoding="utf-8")))
    for name, cells in exercises.items():
        check = find(name)
        cells["solution"] = solved[name]
        cells["hints"] = list(check.about.hints) if check else []
        if variants := check and check.variants:  # the book's sentences, those of each variant, what hints are about
            drawn = [variants.sentences(number) for number in range(len(variants.all))]
            cells["variants"] = {"book": variants.sentences(None), "drawn": drawn, "about": variants.of_book}
    if exercises:
        up = "../" * page.count("/")
        notebook = f"{up}_sources/{page}.ipynb"
        text = json.dumps({"exercises": exercises, "notebook": notebook}).replace("</", "<\\/")
        context["body"] += f'<script type="application/json" id="dp-exercises">{text}</script>'
        add_editors(app)


def marked(section: str, names: list[str]) -> str:
    """Say below an exercise's heading where it is answered; one of this page gets a tick beside the heading, too."""
    if not (answer := ANSWER.search(section)):
        return section
    tick, where = "", '<span class="dp-where">In JupyterLab</span>'
    if (name := answer[1]) in names:
        tick = f'<span class="dp-tick" data-exercise="{name}" role="img" aria-label="solved" hidden>\u2713</span>'
        where = '<span class="dp-where dp-here">Answered here</span>'
    heading = re.compile(r'(<a class="headerlink".*?</h2>)', re.DOTALL)
    return heading.sub(lambda found: f"{tick}{found[1]}\n{where}", section, count=1)


def add_editors(app: Sphinx) -> None:
    """Load what makes exercises and cells to run of a page's JSON."""
    for name in ("dp/editor.js", "dp/exercise.js"):
        app.add_js_file(name, loading_method="defer")


def runs_of(notebook: dict[str, Any]) -> list[dict[str, str]]:
    """Return the cells with the tag `run`: of the cells before each the statements that it needs, and its own text."""
    found: list[dict[str, str]] = []
    before: list[ast.stmt] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            if "run" in cell["metadata"].get("tags", []):
                found.append({"before": needed(before, source), "source": source})
            before += ast.parse(source).body
    return found


def needed(before: list[ast.stmt], source: str) -> str:
    r"""Return the statements that bind what a cell uses, and of their imports the names that it uses.

    >>> needed(ast.parse("import torch; from math import log, pi; two = 2; f = lambda x: two * log(x)").body, "f(1)")
    'from math import log\ntwo = 2\nf = lambda x: two * log(x)'
    """
    used, size = names_in(source)[0], -1
    kept: list[str] = []
    while len(used) > size:  # until what is kept needs nothing more
        size, kept = len(used), []
        for statement in before:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                statement = copy(statement)
                statement.names = [one for one in statement.names if (one.asname or one.name.split(".")[0]) in used]
            text = ast.unparse(statement) if getattr(statement, "names", True) else ""
            if names_in(text)[1] & used:
                kept.append(text)
        used = used.union(*(names_in(text)[0] for text in kept))
    return "\n".join(kept)


def names_in(code: str) -> tuple[set[str], set[str]]:
    r"""Return the names that code uses without binding them, and those that it binds.

    >>> names_in("def f(x):\n    return x + y\nf(1)")
    ({'y'}, {'f'})
    """
    top = symtable(code, "<cell>", "exec")
    bound = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    tables, used = [top], set()
    for table in tables:
        tables += table.get_children()
        used |= {one.get_name() for one in table.get_symbols() if one.is_global() or table is top}
    return used - bound, bound


def add_runs(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Write the JSON of a page's cells that its text asks to change, and load what runs them."""
    if app.config.has_python and RUN.search(context.get("body", "")):
        runs = runs_of(json.loads(Path(app.srcdir, f"{page}.ipynb").read_text(encoding="utf-8")))
        text = json.dumps(runs).replace("</", "<\\/")
        context["body"] += f'<script type="application/json" id="dp-runs">{text}</script>'
        add_editors(app)


def add_python(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Load what asks Python, where something does: exercises, cells to run, a studio, a planner."""
    if app.config.has_python and ASKS.search(context.get("body", "")):
        app.add_js_file("dp/python.js", loading_method="defer")


def add_progress(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Load what shows which exercises are solved; the home page has a line for it."""
    if app.config.has_python:
        app.add_js_file("progress.js", loading_method="defer", priority=400)  # before what asks for it
        if page == app.config.root_doc:
            context["body"] = context["body"].replace("</h1>", '</h1>\n<p class="dp-progress"></p>', 1)


def write_progress(app: Sphinx, error: Exception | None) -> None:
    """Write the script of what is solved: what a browser keeps, the names of each page's exercises, and the rest."""
    if error is None and app.config.has_python and app.builder.format == "html":
        from dualpipe_lab.viz.bundle import store_script

        root, found = Path(app.srcdir), {}
        for page in sorted(app.env.found_docs):
            source = root / f"{page}.ipynb"
            if page.startswith("exercises/") and source.is_file():
                found[page] = list(cells_of(json.loads(source.read_text(encoding="utf-8")), in_page(root)))
        names = json.dumps({page: some for page, some in found.items() if some}, separators=(",", ":"))
        script = (root / "_ext" / "progress.js").read_text(encoding="utf-8")
        text = f"{store_script()}const EXERCISES = {names};\n{script}"
        Path(app.outdir, "_static", "progress.js").write_text(text, encoding="utf-8")


def write_python(app: Sphinx, error: Exception | None) -> None:
    """Write Python for the browser, unless npm has none."""
    if error is None and app.config.has_python and app.builder.format == "html":
        target = Path(app.outdir, "_static", "python")
        target.mkdir(parents=True, exist_ok=True)
        _write_pyodide(_fetched(), target)
        _pack(target, "course.zip", _course(Path(app.srcdir)))


def _fetched() -> Path:
    """Return npm's archive of Pyodide, fetched once for all builds."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dualpipe-lab"
    archive = folder / f"pyodide-{PYODIDE}.tgz"
    if not archive.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(shutil.which("npm")), "pack", "--silent", f"pyodide@{PYODIDE}"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)  # noqa: S603
    if hashlib.sha256(archive.read_bytes()).hexdigest() != DIGEST:
        archive.unlink()
        raise OSError(f"pyodide {PYODIDE} is not the archive that was tested; build again")
    return archive


def _write_pyodide(archive: Path, target: Path) -> None:
    if (target / "pyodide.mjs").is_file():
        return
    with tarfile.open(archive) as files:

        def read(name: str) -> bytes:
            return files.extractfile(f"package/{name}").read()  # type: ignore[union-attr]

        for name in ("pyodide.asm.wasm", "pyodide.asm.mjs"):
            _pack(target, name, read(name))
        with zipfile.ZipFile(io.BytesIO(read("python_stdlib.zip"))) as library:
            _pack(target, "python_stdlib.zip", _stored({name: library.read(name) for name in library.namelist()}))
        (target / "lock.json").write_text(json.dumps(json.loads(read("pyodide-lock.json")) | {"packages": {}}))
        (target / "pyodide.mjs").write_bytes(read("pyodide.mjs"))


def _course(root: Path) -> bytes:
    """Return the modules of the library and the checks that do without torch, and the texts of the official parts."""
    paths = [
        path
        for name in ("dualpipe_lab", "dualpipe_course", PARTS)
        for path in sorted((root / name).rglob("*"))
        if path.suffix in (".py", ".pyi", ".json")
    ]
    kept = [path for path in paths if not set(path.relative_to(root).parts) & set(LEFT_OUT)]
    texts = {path.relative_to(root).as_posix(): path.read_bytes() for path in kept}
    wanted = (name for name, text in texts.items() if name.startswith(PARTS) or not NEEDS_TORCH.search(text.decode()))
    return _stored({name: texts[name] for name in wanted})


def _stored(files: dict[str, bytes]) -> bytes:
    """Return an archive whose files are not compressed one by one: compressed as a whole it is smaller."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as out:
        for name, text in files.items():
            out.writestr(zipfile.ZipInfo(name), text)
    return archive.getvalue()


def _pack(target: Path, name: str, data: bytes) -> None:
    (target / f"{name}.packed").write_bytes(gzip.compress(data, mtime=0))


def fetch_python(app: Sphinx, config: Any) -> None:
    """Look for npm and what it has to fetch: without them checks and verdicts are the notebook's."""
    try:
        config.has_python = shutil.which("npm") is not None and _fetched().is_file()
    except (OSError, subprocess.CalledProcessError) as error:
        LOG.info("npm did not fetch Python for the pages: %s", error)
    if not config.has_python:
        LOG.info("pages have no Python to check with: there is no npm, or it reaches nothing")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers."""
    app.add_config_value("has_python", False, "html")
    app.connect("config-inited", fetch_python)
    app.connect("html-page-context", add_exercises)
    app.connect("html-page-context", add_runs)
    app.connect("html-page-context", add_python)
    app.connect("html-page-context", add_progress)
    app.connect("build-finished", write_python)
    app.connect("build-finished", write_progress)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
