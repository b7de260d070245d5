"""A page of the book runs again exactly when something changed that its code may execute."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "_ext"))
import dp_cache  # noqa: E402
from dp_imports import Library  # noqa: E402

sys.path.pop(0)

FACADE = "import sys\nfrom dualpipe_lab._facade import make_facade\n"
LIBRARY = {
    "dualpipe_lab/__init__.py": f"{FACADE}sys.modules[__name__].start_fork_server()\n",
    "dualpipe_lab/__init__.pyi": "from . import comm, cp, tp, viz\n"
    "from .launch.server import start_fork_server as start_fork_server\n",
    "dualpipe_lab/_facade.py": "def make_facade(name): ...\n",
    "dualpipe_lab/launch/__init__.py": "",
    "dualpipe_lab/launch/server.py": 'PRELOAD = ["torch", "dualpipe_lab.launch.rank"]\ndef start_fork_server(): ...\n',
    "dualpipe_lab/launch/rank.py": "",
    "dualpipe_lab/launch/unused.py": "",
    "dualpipe_lab/comm/__init__.py": FACADE,
    "dualpipe_lab/comm/__init__.pyi": "from .sums import all_reduce as all_reduce\n",
    "dualpipe_lab/comm/sums.py": "def all_reduce(): ...\n",
    "dualpipe_lab/cp/__init__.py": FACADE,
    "dualpipe_lab/cp/__init__.pyi": "from .ring import ring as ring\nfrom .softmax import softmax as softmax\n",
    "dualpipe_lab/cp/ring.py": "def ring():\n    from dualpipe_lab import comm\n    return comm.all_reduce(), tiles\n",
    "dualpipe_lab/cp/softmax.py": "from dualpipe_lab.cp import tiles\n",
    "dualpipe_lab/cp/tiles.py": "",
    "dualpipe_lab/tp/__init__.py": FACADE,
    "dualpipe_lab/tp/__init__.pyi": "from .linear import Linear as Linear\n",
    "dualpipe_lab/tp/linear.py": "import dualpipe_lab.comm.sums\nclass Linear: ...\n",
    "dualpipe_lab/viz/__init__.py": FACADE,
    "dualpipe_lab/viz/__init__.pyi": "from .chart import Chart as Chart\n",
    "dualpipe_lab/viz/chart.py": "",
    "dualpipe_lab/viz/static/chart.mjs": "",
    "dualpipe_course/__init__.py": "",
    "dualpipe_ours/__init__.py": "",
    "dualpipe_ours/ring.py": "from dualpipe_lab.comm import all_reduce\n",
    "dualpipe_ours/data.py": "from .ring import pass_on\n",
    "dualpipe_ours/zero1.py": "from .ring import pass_on\n",
    "dualpipe_course/hints.py": "",
    "requirements.txt": "torch==1",
}
HEADER = "---\njupytext:\n  text_representation:\n    extension: .md\n    format_name: myst\n---\n\n# Page\n\n"
PAGES = {
    "ring": "import dualpipe_lab as lab\nlab.cp.ring()",
    "linear": "from dualpipe_lab.tp import Linear\nLinear()",
    "drawn": "from dualpipe_lab import viz\nviz.Chart()",
    "data": "from dualpipe_ours.data import DataParallel\nDataParallel()",
}
EVERY = set(PAGES)
EDITS = {
    "cp/ring.py": {"ring"},
    "comm/sums.py": {"ring", "linear", "data"},
    "tp/linear.py": {"linear"},
    "tp/__init__.pyi": {"linear"},
    "cp/tiles.py": set(),
    "launch/server.py": EVERY,
    "launch/rank.py": EVERY,
    "launch/unused.py": set(),
    "viz/static/chart.mjs": {"drawn"},
    "__init__.pyi": EVERY,
    "../dualpipe_course/hints.py": set(),
    "../dualpipe_ours/ring.py": {"data"},
    "../dualpipe_ours/zero1.py": set(),
    "../requirements.txt": EVERY,
}


@pytest.fixture
def root(tmp_path):
    """A small library of façades, and three pages."""
    pages = {f"{name}.md": f"{HEADER}```{{code-cell}} ipython3\n{code}\n```\n" for name, code in PAGES.items()}
    for name, text in (LIBRARY | pages).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def states(root):
    """The state of each page, as a build that starts now sees it."""
    found = dp_cache.States(root)
    return {name: found.of(root / f"{name}.md") for name in PAGES}


def changed(before, after):
    return {name for name in PAGES if before[name] != after[name]}


def test_an_edit_runs_the_pages_that_may_execute_it(root, subtests):
    for name, pages in EDITS.items():
        with subtests.test(name=name, pages=pages):
            before = states(root)
            assert len(set(before.values())) == len(PAGES)
            with (root / "dualpipe_lab" / name).open("a") as file:
                file.write("# more\n")
            assert changed(before, states(root)) == pages


def test_removed_renamed_and_new_modules_and_versions_count(root, monkeypatch):
    before = states(root)
    (root / "dualpipe_lab" / "cp" / "ring.py").rename(root / "dualpipe_lab" / "cp" / "rings.py")
    assert changed(before, states(root)) == {"ring"}
    (root / "dualpipe_lab" / "cp" / "rings.py").unlink()
    assert changed(before, states(root)) == {"ring"}
    before = states(root)
    (root / "dualpipe_lab" / "viz" / "static" / "new.mjs").touch()
    assert changed(before, states(root)) == {"drawn"}
    before = states(root)
    for name in ("platform", "metadata"):  # of Python, and of torch
        with monkeypatch.context() as patched:
            other = {"python_version": lambda: "9", "version": lambda _: "9"}
            patched.setattr(dp_cache, name, type("Other", (), other))
            assert changed(before, states(root)) == EVERY


CP, VIZ = {"cp/ring.py", "cp/softmax.py", "cp/tiles.py", "comm/sums.py"}, {"viz/chart.py", "viz/static/chart.mjs"}
CODES = {
    "from dualpipe_lab.cp import ring as r": {"cp/ring.py", "comm/sums.py"},
    "def later():\n    from dualpipe_lab.cp import ring": {"cp/ring.py", "comm/sums.py"},
    "import dualpipe_lab\ndualpipe_lab.cp.ring()": {"cp/ring.py", "comm/sums.py"},
    "from dualpipe_lab import cp as parts\nparts.ring()": {"cp/ring.py", "comm/sums.py"},
    "import dualpipe_lab.cp as parts\nparts.ring()": {"cp/ring.py", "comm/sums.py"},
    "from dualpipe_lab import cp": set(),
    "from dualpipe_lab import cp\ngetattr(cp, input())": CP,
    "from dualpipe_lab import cp\ncp.rong()": CP,
    "from dualpipe_lab.cp import rong": CP,
    "from dualpipe_lab.cp import *": CP,
    "from dualpipe_lab.cp.gone import ring": CP,
    "name = 'dualpipe_lab.viz.chart'": VIZ,
    "print('nothing')": set(),
}


def without_common(root, files):
    """Files of a part, less what every import of the library needs."""
    names = {path.relative_to(root / "dualpipe_lab").as_posix() for path in files}
    return {name for name in names if "/" in name and not name.startswith("launch/") and "/__init__.py" not in name}


def test_names_are_looked_up_where_the_stubs_say(root, subtests):
    for code, files in CODES.items():
        with subtests.test(code=code, files=files):
            assert without_common(root, Library(root).files_of(code)) == files


@pytest.mark.parametrize(
    "code", ["%timeit 1", "!ls", "import subprocess", "exec('x')", "from importlib import import_module as load"]
)
def test_code_that_hides_what_it_runs_depends_on_everything(root, code):
    library = Library(root)
    found = library.files_of(code)
    assert found == library.all_files()
    assert {path.relative_to(root).as_posix() for path in found} == set(LIBRARY) - {"requirements.txt"}


@pytest.fixture(scope="module")
def book():
    """What the code of each executed page depends on."""
    library, texts = Library(ROOT), load(ROOT / "tools" / "check_pairs.py").sources(ROOT)
    pages = [page for page in texts if page.is_relative_to(ROOT / "book")]
    return {
        page.relative_to(ROOT / "book").with_suffix("").as_posix(): {
            path.relative_to(ROOT).as_posix() for path in library.files_of(dp_cache.code_of(page))
        }
        for page in pages
    }


def test_the_chapters_depend_on_what_they_show_and_not_on_other_parts(book):
    assert "dualpipe_lab/cp/ring_attention.py" in book["cp/ring-attention"]
    assert "dualpipe_lab/cp/ring_attention.py" not in book["tp/swiglu"]
    assert "dualpipe_lab/dp/zero3.py" in book["dp/zero-3"]
    assert "dualpipe_lab/dp/zero3.py" not in book["dp/zero-2"]
    everywhere = set.intersection(*book.values())
    assert {
        "dualpipe_lab/launch/server.py",
        "dualpipe_lab/launch/rank.py",
        "dualpipe_lab/timeline/model.py",
    } <= everywhere
    assert "dualpipe_lab/viz/static/element.mjs" in everywhere  # any cell may end with a timeline


# The museum's runs and a step of the trainer belong to the course; none of these files holds a check or a hint.
PACKAGE = {"__init__.py", "sanitize.cfg"}
SHOWN = {
    "whole/cuts": {
        "plain.py", "trial.py", "wrong.py", "own/__init__.py", "own/exported/README.md", "own/finder.py",
        "own/looked_at.py", "own/parts.py", "own/trainings.py",
    },
    "pp/studio": {"pp/__init__.py", "pp/challenges.py"},
    "whole/museum": {
        "whole/__init__.py",
        "meter.py", "whole/defects.py", "whole/model_parallel_run.py", "whole/torch_defects.py",
        "whole/training_log.py", "whole/training_run.py",
    },
}  # fmt: skip


def test_no_chapter_runs_again_for_a_hint_and_none_for_everything(book):
    assert len(book) > 40
    for page, files in book.items():
        course = {name.removeprefix("dualpipe_course/") for name in files if name.startswith("dualpipe_course")}
        assert course == (PACKAGE | SHOWN[page] if page in SHOWN else set()), page
        assert "dualpipe_lab/cli/app.py" not in files, page


def test_the_library_hides_no_import_from_the_graph():
    """Façades import by their stubs, `restricted` the types of what a rank sends, `accelerator` another package.

    `preload` and `preload_later` import what ranks would import themselves, earlier; no module imports these two.
    """
    hidden = re.compile(r"import_module|__import__|importlib\.util|runpy")
    found = [path for path in (ROOT / "dualpipe_lab").rglob("*.py") if hidden.search(path.read_text())]
    names = {"_facade.py", "restricted.py", "accelerator.py", "preload.py", "preload_later.py"}
    assert {path.name for path in found} == names


CONF = """import sys
sys.path.insert(0, {ext!r})
extensions = ["myst_nb", "dp_cache", "dp_kernels", "dp_parallel"]
html_theme, nb_execution_mode, project = "basic", "cache", "p"
"""
RUNS = """from pathlib import Path
from dualpipe_lab.{part} import word

with Path("{part}.runs").open("a") as runs:
    runs.write("x")
print("{part} says", word.WORD, "in run", len(Path("{part}.runs").read_text()))
"""


def test_a_rebuild_reads_and_runs_the_pages_whose_imports_have_changed(tmp_path):
    (tmp_path / "conf.py").write_text(CONF.format(ext=str(ROOT / "_ext")))
    (tmp_path / "index.md").write_text("# Index\n\n```{toctree}\ncp\ntp\n```\n")
    header = HEADER.replace("---\n\n", "kernelspec: {name: python3, display_name: Python 3}\n---\n\n")
    for part in ("cp", "tp"):
        (tmp_path / f"{part}.md").write_text(f"{header}```{{code-cell}} ipython3\n{RUNS.format(part=part)}```\n")
        (tmp_path / "dualpipe_lab" / part).mkdir(parents=True)
        (tmp_path / "dualpipe_lab" / "__init__.py").touch()
        (tmp_path / "dualpipe_lab" / part / "word.py").write_text("WORD = 'one'")
    found = []
    for word in ("one", "two"):
        (tmp_path / "dualpipe_lab" / "cp" / "word.py").write_text(f"WORD = {word!r}")
        command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", ".", "out/html"]
        paths = os.pathsep.join([str(tmp_path), str(ROOT)])  # the course that forks kernels is the real one
        environment = os.environ | {"PYTHONPATH": paths, "JUPYTER_DEFAULT_PROVISIONER_NAME": "forked"}
        subprocess.run(command, cwd=tmp_path, check=True, timeout=120, env=environment)
        pages = [(tmp_path / "out" / "html" / f"{part}.html").read_text() for part in ("cp", "tp")]
        found.append([re.search(r"\w+ says \w+ in run \d", page)[0] for page in pages])
    assert found == [
        ["cp says one in run 1", "tp says one in run 1"],
        ["cp says two in run 2", "tp says one in run 1"],
    ]
