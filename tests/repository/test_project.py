"""The project's shell: commands, prerequisites with remedies, the lock, one address."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml
from scripts import load

import dualpipe_lab

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command, **options):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)


# ---- prerequisites


def fake(folder, name, script):
    """Put an executable of that name into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


OLD = 'case "$*" in *version_info*) exit 1;; --version) echo Python 3.9.18;; esac'
BARE = 'case "$*" in *ensurepip*) exit 1;; --version) echo Python 3.11.2;; esac'


@pytest.mark.parametrize(
    ("script", "problem", "remedy"),
    [
        ("exit 127", "cannot be run", "make book PYTHON="),
        (OLD, "is Python 3.9.18, and Python 3.11 or newer is needed", "name a newer one"),
        (BARE, "has no venv or ensurepip module", "apt-get install python3-venv"),
    ],
)
def test_an_unfit_python_is_named_with_its_remedy(tmp_path, script, problem, remedy):
    result = run("tools/prerequisites.sh", fake(tmp_path / "bin", "python", script))
    assert result.returncode == 1
    assert result.stdout == ""
    assert problem in result.stderr
    assert re.search(f"remedy: .*{re.escape(remedy)}", result.stderr)


@pytest.mark.parametrize(("missing", "problem"), [("git", "git was not found"), ("python", "no Python 3.11 or newer")])
def test_a_missing_program_is_named(tmp_path, missing, problem):
    good = fake(tmp_path / "bin", "good-python", "exit 0")
    for tool in ("bash", "awk", "df", "env"):
        (tmp_path / "bin" / tool).symlink_to(f"/usr/bin/{tool}")
    arguments = [good] if missing == "git" else [""]
    result = run("/usr/bin/bash", "tools/prerequisites.sh", *arguments, env={"PATH": str(tmp_path / "bin")})
    assert result.returncode == 1
    assert problem in result.stderr
    assert "remedy: install it" in result.stderr


def test_a_full_disk_is_named_before_anything_is_installed(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "DUALPIPE_LAB_NEEDED_MIB": "999999999"}
    python = fake(tmp_path / "bin", "python", "exit 0")
    result = run("tools/prerequisites.sh", python, str(tmp_path / "venv"), env=environment)
    assert "needs 999999999 MiB" in result.stderr
    assert result.returncode == 1
    assert not (tmp_path / "venv").exists()


def test_a_failed_installation_leaves_no_stamp_and_says_what_to_do(tmp_path):
    fake(tmp_path / "bin", "python", "echo no network >&2; exit 1")
    result = run("make", "book", f"VENV={tmp_path}")
    assert result.returncode != 0
    assert "pip could not install the locked packages" in result.stderr
    assert "HTTPS_PROXY" in result.stderr
    assert not (tmp_path / ".installed").exists()


# ---- locked versions


def requirements(name):
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


def pins(name):
    """The pins of a requirements file or lock, each with its hashes."""
    found = {}
    for line in "\n".join(requirements(name)).removeprefix("-e .\n").replace(" \\\n", " ").splitlines():
        pin, *hashes = re.split(r"\s+(?=--hash)", line)
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*( ; [\w\s.'=!<>()]+)?", pin), line
        found[pin] = hashes
    return found


LOCKS = ("requirements.lock", "requirements-book.lock", "requirements-dev.lock")


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_is_locked_with_hashes_and_comes_from_no_particular_place(lock):
    for pin, hashes in pins(lock).items():
        assert hashes, f"{pin} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), pin


def test_what_people_install_is_what_is_locked():
    people, learners, book, tools = (list(pins(name)) for name in ("requirements.txt", *LOCKS))
    assert requirements("requirements.txt")[:2] == ["-e .", "torch==2.13.0"]
    (declared,) = (line for line in PROJECT["dependencies"] if plain(line) == "torch")
    lowest, above = (tuple(map(int, number.split("."))) for number in re.findall(r"[\d.]+", declared))
    assert (2, 10) == lowest <= (2, 13) < above, "2.10 is the oldest torch with every name of dualpipe_lab/_private.py"
    assert people == ["torch==2.13.0", *sorted([*learners, *book], key=plain)]
    locked = [plain(pin) for pin in (*learners, *book, *tools)]
    assert len(set(locked)) == len(locked)


def plain(requirement):
    return re.split(r"[\[<>=~! ]", requirement)[0].lower().replace("_", "-").replace(".", "-")


def test_torch_and_what_only_torch_brings_stand_in_no_lock():
    locked = {plain(pin) for lock in LOCKS for pin in pins(lock)}
    assert not locked & {"torch", "sympy", "networkx", "triton"}
    assert "fsspec" not in {plain(pin) for pin in pins("requirements.lock")}  # transformers brings it too, for tests
    assert not [name for name in locked if name.startswith(("nvidia-", "cuda-"))]


def test_the_lock_covers_what_the_project_declares():
    lock = load(ROOT / "tools" / "lock.py")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    locked = set()
    wanted = {plain(line) for line in [*build, lock.EDITABLE, lock.INSTALLER]}
    for extra, name in zip(("lab", "book", "dev"), LOCKS, strict=True):
        locked |= {plain(pin) for pin in pins(name)}
        wanted |= {plain(line) for line in lock.requirements(PROJECT, extra)}
        assert wanted <= locked
        assert ("sphinx" in locked) == (extra != "lab"), "a learner's JupyterLab needs no builder"


def test_the_resolver_s_words_become_locks():
    lock = load(ROOT / "tools" / "lock.py")
    text = "# x\na==1 ; os == 'x' \\\n    --hash=sha256:0 \\\n    --hash=sha256:1\nB_c==2 \\\n    --hash=sha256:2\n"
    assert list(lock.blocks(text)) == ["a", "b-c"]
    assert lock.without_hashes("".join(lock.blocks(text).values())) == "a==1 ; os == 'x'\nB_c==2\n"
    project = {
        "dependencies": ["torch>=2", "numpy"],
        "optional-dependencies": {"a": ["x"], "b": ["dualpipe-lab[a]", "y"]},
    }
    assert lock.requirements(project, "b") == ["numpy", "y", "x"]


# ---- one version, one address, licences


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert dualpipe_lab.__version__ == PROJECT["version"] == citation["version"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_the_repository_s_address_stands_in_one_place():
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout.split()
    if not files:
        pytest.skip("not a git checkout, so built files cannot be told from sources")
    texts = {name: (ROOT / name).read_text(errors="ignore") for name in files if (ROOT / name).is_file()}
    holders = [name for name, text in texts.items() if re.search(r"github\.com/ORG/", text)]
    assert sorted(holders) == ["_config.yml", "tests/test_extensions.py"]


# ---- modules


def test_a_header_has_at_most_twelve_lines():
    """A reader meets the first statement soon; why a line is as it is stands beside it."""
    root = ROOT / "dualpipe_lab"
    headers = {
        path.relative_to(root).as_posix(): ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        for path in root.rglob("*.py")
    }
    assert len(headers) > 250
    assert sorted(name for name, header in headers.items() if len(header.splitlines()) > 12) == []


def test_every_benchmark_starts():
    """They import from one another, and `make test` runs none of them."""
    names = sorted(file.stem for file in (ROOT / "benchmarks").glob("[a-z]*.py"))
    assert len(names) > 8
    text = f"import importlib, sys; sys.path.insert(0, 'benchmarks'); [importlib.import_module(n) for n in {names}]"
    started = run(sys.executable, "-c", text)
    assert started.returncode == 0, started.stderr


def test_modules_of_tests_have_names_of_their_own():
    """Pytest imports them by name alone, and some tests put benchmarks/ into the path of ranks."""
    files = [file.name for file in (ROOT / "tests").rglob("*.py") if file.name not in ("__init__.py", "conftest.py")]
    assert [name for name, number in Counter(files).items() if number > 1] == []
    ours = {path.stem for path in (ROOT / "tests").glob("*") if path.suffix == ".py" or (path / "__init__.py").exists()}
    others = {path.stem for folder in ("benchmarks", "examples", "tools") for path in (ROOT / folder).iterdir()}
    assert ours & others == set()
