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

import dualpipe_lab as lab

ROOT = Path(__file__).parents[1]
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


@pytest.fixture
def on_colab(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))


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


def test_nothing_happens_outside_colab(ran):
    assert "google.colab" not in sys.modules
    for url in (URL, "https://git.example/ORG/course"):
        exec(install_cell.code(url, "main", "book/pp"), {})
    assert ran == []


def test_colab_gets_the_course_and_keeps_its_torch(ran, on_colab):
    exec(install_cell.code(URL, "main", "book/pp"), {})
    (clone, _), (pip, options), folder = ran
    assert clone[:2] == ["git", "clone"]
    assert clone[-2:] == [URL, "/content/dualpipe-lab"]
    assert "--no-deps" in pip
    assert not any("torch" in word for word in pip)
    assert options == {"check": True}
    assert folder == "/content/dualpipe-lab/book/pp"


def test_without_an_address_colab_says_so(ran, on_colab):
    with pytest.raises(SystemExit, match=r"set repository.url in _config.yml"):
        exec(install_cell.code(install_cell.PLACEHOLDER, "main", "book"), {})
    assert ran == []


def test_the_configuration_s_address_is_read():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]
    assert install_cell.address((ROOT / "_config.yml").read_text()) == (config["url"], config["branch"])
    with pytest.raises(ValueError, match="has no repository"):
        install_cell.address("title: x\n")


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


def test_the_container_copies_files_that_exist_and_installs_the_lock_and_nothing_else():
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
    (install,) = [words for words in lines if "tools/install.sh" in words]
    assert install[3:5] == ["/home/learner/venv", "requirements.lock"]
    assert "pip" not in {word for words in lines for word in words}
    user = [words[1] for words in lines if words[0] == "USER"]
    assert user == ["learner"]


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


@pytest.mark.parametrize("index", ["", "address-of-cpu-builds"])
@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_torch_alone_comes_from_its_own_index(tmp_path, index, lock):
    """With a second index for all, pip would take any package from whichever offers it."""
    python, log = tmp_path / "bin" / "python", tmp_path / "calls"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    python.chmod(0o755)
    command = ["tools/install.sh", str(tmp_path), lock]
    environment = {name: value for name, value in os.environ.items() if name != "TORCH"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment | {"TORCH_INDEX_URL": index}, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr
    torch, locked, package = log.read_text().splitlines()
    assert torch.endswith(f"--index-url {index} torch==2.13.0" if index else "version-check torch==2.13.0")
    assert locked.endswith(f"--require-hashes --requirement {lock}")
    assert "--no-deps --no-build-isolation --editable" in package
    assert "index" not in locked + package


def test_the_readme_s_picture_is_the_timeline_of_dualpipe():
    """With a style that a dark page changes."""
    (shown,) = re.findall(r"!\[.*\]\((.*\.svg)\)", (ROOT / "README.md").read_text())
    picture = re.sub(r"<style>.*</style>", "", (ROOT / shown).read_text())
    assert picture == lab.simulate(lab.schedules.dualpipe(8, 20)).to_svg() + "\n"
