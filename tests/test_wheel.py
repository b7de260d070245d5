"""The library alone, its wheel in an environment with what it requires and nothing else; the classroom's archive."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from environments import build_wheel, closure, declared, empty_environment

from dualpipe_lab._optional import MissingExtra, extra

ROOT = Path(__file__).parents[1]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, env=CLEAN, timeout=300, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_requires_what_the_library_imports_to_compute(wheel):
    assert {each.name for each in declared(wheel)} == {"torch", "cloudpickle", "numpy", "rich", "safetensors", "typer"}
    assert not {"matplotlib", "ipykernel", "anywidget", "psutil", "jupytext", "pytest"} & set(closure(declared(wheel)))


def test_the_wheel_holds_the_library_and_nothing_of_the_solutions(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "dualpipe_lab/__init__.pyi" in names
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages <= {"dualpipe_lab", "dualpipe_course", "dualpipe_ours"}
    assert not [name for name in names if re.search(r"solutions|tests|wrong_|right_", name)]
    assert any(name.startswith("dualpipe_lab/viz/static/") for name in names)
    assert "dualpipe_course/sanitize.cfg" in names


def test_the_wheel_works_where_nothing_else_is_installed(wheel, tmp_path):
    python = empty_environment(tmp_path / "empty", wheel)
    shutil.copy(ROOT / "tools" / "smoke.py", tmp_path)
    done = run(str(python), "smoke.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smoke: ok" in done.stdout
    for package, name in (("matplotlib", "notebook"), ("anywidget", "notebook"), ("psutil", "grading")):
        assert f"without {package}: the extra [{name}] is named" in done.stdout
    graded = run(str(python.parent / "dualpipe-lab"), "grade", ".", cwd=tmp_path)
    assert graded.returncode == 1
    assert graded.stderr == 'error: grading needs psutil; run: pip install "dualpipe-lab[grading]"\n'


def test_a_missing_package_is_named_with_its_extra_and_a_missing_module_of_ours_is_not():
    with (
        pytest.raises(MissingExtra, match=r'^a widget needs no_such; run: pip install "dualpipe-lab\[notebook\]"$'),
        extra("notebook", "a widget"),
    ):
        __import__("no_such")
    with pytest.raises(ModuleNotFoundError) as raised, extra("notebook", "a widget"):
        __import__("dualpipe_lab.no_such")
    assert not isinstance(raised.value, MissingExtra)


def test_the_archive_serves_a_classroom_without_a_network(tmp_path):
    """Built without the book where there is none, which its README then says."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; requirements.lock has it")
    made = run(sys.executable, "tools/release.py", str(tmp_path / "dist"), cwd=ROOT)
    assert made.returncode == 0, made.stderr
    (archive,) = (tmp_path / "dist").glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(tmp_path)
    (course,) = tmp_path.glob("dualpipe-lab-*")
    readme = (course / "README.md").read_text()
    has_book = (ROOT / "_build" / "html" / "index.html").exists()
    assert has_book == (course / "book" / "index.html").exists()
    assert ("This archive was made without the built book" in readme) == (not has_book)
    assert {"requirements.lock", "LICENSE", "LICENSE-text", "exercises"} <= {path.name for path in course.iterdir()}
    assert len(list((course / "exercises").rglob("*.ipynb"))) == len(list((ROOT / "exercises").rglob("*.ipynb")))
    assert not [path for path in course.rglob("*") if "solution" in path.name.lower()]
    (wheel,) = course.glob("*.whl")
    assert wheel.name in readme
    python = empty_environment(tmp_path / "classroom", wheel)
    checked = run(str(python), "-c", "from dualpipe_course import check; print(check.gpipe)", cwd=course)
    assert checked.returncode == 0, checked.stderr
    shown = run(str(python.parent / "dualpipe-lab"), "show", "gpipe", "--ranks", "2", "--microbatches", "2", cwd=course)
    assert "rank 1" in shown.stdout, shown.stderr
