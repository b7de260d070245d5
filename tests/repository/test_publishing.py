"""What a published copy needs: the cell that installs the course on Colab, Binder's list, workflows."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from scripts import load

import dualpipe_lab as lab

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import install_cell  # noqa: E402

sys.path.pop(0)
URL = "https://github.com/someone/course"


@pytest.fixture
def ran(monkeypatch):
    """What a cell asks the machine to do, instead of doing it."""
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: calls.append((command, options)))
    monkeypatch.setattr(os, "chdir", lambda folder: calls.append(folder))
    return calls


def test_every_executable_page_has_the_cell_of_this_configuration():
    done = subprocess.run(
        [sys.executable, "tools/install_cell.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert len(install_cell.pages(ROOT)) >= 5
    for page in install_cell.pages(ROOT):
        assert page.read_text().count("source_hidden: true\ntags: [remove-cell, install]") == 1


def test_a_missing_or_old_cell_is_named_and_then_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "book" / "pp").mkdir(parents=True)
    page = tmp_path / "book" / "pp" / "page.md"
    page.write_text("# Page\n\n```{code-cell} ipython3\n1 + 1\n```\n")
    (tmp_path / "_config.yml").write_text(f"repository:\n  url: {URL}\n  branch: dev\n")
    monkeypatch.chdir(tmp_path)
    assert install_cell.main(["--check"]) == 1
    assert "book/pp/page.md: the cell that installs" in capsys.readouterr().out
    assert install_cell.main([]) == install_cell.main(["--check"]) == 0
    assert f'"--branch=dev", "{URL}"' in page.read_text()
    (tmp_path / "_config.yml").write_text(f"repository:\n  url: {URL}\n  branch: main\n")
    assert install_cell.main(["--check"]) == 1
    assert install_cell.main([]) == install_cell.main(["--check"]) == 0
    assert page.read_text().count("remove-cell") == 1
    assert page.read_text().endswith("```{code-cell} ipython3\n1 + 1\n```\n")


def test_colab_alone_gets_the_course_and_keeps_its_torch(ran, monkeypatch):
    exec(install_cell.code(URL, "main", "book/pp"), {})
    assert ran == []
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    with pytest.raises(SystemExit, match=r"set repository.url in _config.yml"):
        exec(install_cell.code(install_cell.PLACEHOLDER, "main", "book"), {})
    exec(install_cell.code(URL, "main", "book/pp"), {})
    (clone, _), (pip, options), folder = ran
    assert clone[:2] == ["git", "clone"]
    assert clone[-2:] == [URL, "/content/dualpipe-lab"]
    assert "--no-deps" in pip
    assert not any("torch" in word for word in pip)
    assert options == {"check": True}
    assert folder == "/content/dualpipe-lab/book/pp"


def test_binder_installs_the_lock_and_torch_in_the_library_s_range():
    listed = yaml.safe_load((ROOT / "binder" / "environment.yml").read_text())["dependencies"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [name for name in project["dependencies"] if name.startswith("torch")]
    assert listed == ["python=3.11", "pip", torch.replace("torch", "pytorch-cpu")]
    post_build = (ROOT / "binder" / "postBuild").read_text()
    assert "--no-deps --require-hashes --requirement requirements.lock" in post_build
    assert os.access(ROOT / "binder" / "postBuild", os.X_OK)
    locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    extras = [
        *project["dependencies"],
        *(line for name in ("notebook", "grading") for line in project["optional-dependencies"][name]),
    ]
    assert {re.split(r"[=<>]", name)[0].lower() for name in extras} - {"torch"} <= locked


def test_the_container_copies_files_that_exist_and_no_solutions():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    listed = yaml.safe_load((ROOT / "binder" / "environment.yml").read_text())["dependencies"]
    assert lines[0] == ["FROM", listed[0].replace("=", ":") + "-slim"]
    copied = {name for words in lines if words[0] == "COPY" for name in words[1:-1] if not name.startswith("--")}
    assert [name for name in sorted(copied) if not (ROOT / name).exists()] == []
    assert {"dualpipe_lab", "dualpipe_course", "requirements.lock", "tools"} <= copied
    assert not copied & {".", "solutions", "tests", ".git"}
    context = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert context == copied
    assert [words[1] for words in lines if words[0] == "USER"] == ["learner"]


def test_actions_are_commits_and_leave_no_token():
    """A tag can be moved to other code; a token on the disk is read by whatever a build installs."""
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = file.read_text()
        assert "EXTRA_INDEX" not in text
        used = re.findall(r"uses: (.*)", text)
        assert used
        assert all(re.match(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use) for use in used)
        steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
        checkouts = [step for step in steps if "actions/checkout@" in step.get("uses", "")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert "run: bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: make test EVERY=1" in (ROOT / ".github" / "workflows" / "nightly.yml").read_text()


INSTALLER = """#!/bin/sh
case "$*" in *pip_settings.py*) echo "export UV_FIND_LINKS=wheels"; exit;; esac
echo "$@" | sed "s/--python [^ ]* //; s/--compile-bytecode //" >> {log}
case "$*" in *dry-run*) exit $NO_ANSWER;; *"-m uv"*) exit $UV_FAILS;; esac
"""


@pytest.mark.parametrize(
    ("settings", "torch", "said"),
    [
        ({}, "--torch-backend=auto torch==2.13.0", ""),
        ({"GPU": "0"}, "--torch-backend=cpu torch==2.13.0", ""),
        ({"GPU": "1"}, "torch==2.13.0", ""),
        ({"TORCH_INDEX_URL": "address"}, "--index-url address torch==2.13.0", ""),
        ({"NO_ANSWER": "1"}, "torch==2.13.0", "did not answer within 10 s: torch comes from the default index"),
        ({"UV_FAILS": "1"}, "--torch-backend=auto torch==2.13.0", "pip tries now"),
        ({"UV_FAILS": "1", "TORCH_INDEX_URL": "address"}, "--index-url address torch==2.13.0", "pip tries now"),
    ],
    ids=["auto", "cpu", "gpu", "index", "no answer", "pip", "pip with index"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="torch has one build alone on macOS")
def test_torch_alone_comes_from_its_own_index(tmp_path, settings, torch, said):
    """With a second index for all, pip and uv would take any package from whichever offers it."""
    python, log = tmp_path / "bin" / "python", tmp_path / "calls"
    python.parent.mkdir()
    python.write_text(INSTALLER.format(log=log))
    python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name not in ("TORCH", "TORCH_INDEX_URL", "GPU")}
    environment = clean | {"NO_ANSWER": "0", "UV_FAILS": "0"} | settings
    command = ["tools/install.sh", str(tmp_path), "requirements.lock"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert said in run.stderr
    calls = [call for call in log.read_text().splitlines() if "dry-run" not in call]
    assert calls[0].startswith("-m pip install --disable-pip-version-check --quiet --require-hashes --requirement")
    assert calls[1] == f"-m uv pip install {torch}"
    installer = "-m uv pip install"
    if "UV_FAILS" in settings:  # after the first call of uv's
        installer = "-m pip install --disable-pip-version-check"
        assert calls.pop(2) == f"{installer} {torch.removeprefix('--torch-backend=auto ')}"
    locked, package = calls[2:]
    assert locked == f"{installer} --no-deps --require-hashes --requirement requirements.lock"
    assert package.startswith(f"{installer} --no-deps --no-build-isolation --editable")


def test_uv_is_told_what_pip_is_told(tmp_path, monkeypatch):
    pip_settings = load(ROOT / "tools" / "pip_settings.py")
    for name, _ in pip_settings.NAMES.values():
        monkeypatch.delenv(name, raising=False)
    listed = (
        f"global.index-url='mirror'\nglobal.extra-index-url='file://{tmp_path} file://{tmp_path}/gone other'\n"
        ":env:.index-url='nearer mirror'\n:env:.find-links='wheels more'\nglobal.require-virtualenv='1'\n"
    )
    assert pip_settings.settings(listed) == {
        "UV_DEFAULT_INDEX": "nearer mirror",
        "UV_INDEX": f"file://{tmp_path} other",
        "UV_FIND_LINKS": "wheels,more",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    monkeypatch.setenv("UV_DEFAULT_INDEX", "mine")
    assert "UV_DEFAULT_INDEX" not in pip_settings.settings(listed)


def test_the_readme_s_picture_is_the_timeline_of_dualpipe():
    """With a style that a dark page changes."""
    (shown,) = re.findall(r"!\[.*\]\((.*\.svg)\)", (ROOT / "README.md").read_text())
    picture = re.sub(r"<style>.*</style>", "", (ROOT / shown).read_text())
    assert picture == lab.simulate(lab.schedules.dualpipe(8, 20)).to_svg() + "\n"
