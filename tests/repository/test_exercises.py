"""The generator: solutions become exercises, nothing is handed out, drift and slips are named."""

import json
import re
import sys
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import make_exercises as tool  # noqa: E402

sys.path.pop(0)

HEADER = (ROOT / "solutions" / "start" / "time" / "time.md").read_text().partition("# ")[0]
PAGE = f"""{HEADER}# Title

```{{code-cell}} ipython3
:tags: [answer-a-1]

def double(x: int) -> int:
    \"\"\"Return twice x.\"\"\"
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION
```

```{{code-cell}} ipython3
:tags: [check-a-1]

check.a.double(double)
```
"""

TOC = """
parts:
  - chapters: [{file: exercises/start/a.md}, {file: exercises/start/b.md}]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solutions" / "start" / "a").mkdir(parents=True)
    (tmp_path / "solutions" / "start" / "a" / "a.md").write_text(PAGE)
    (tmp_path / "_config.yml").write_text("repository:\n  url: https://github.com/someone/course\n  branch: main\n")
    (tmp_path / "_toc.yml").write_text(TOC)
    return tmp_path


def run(capsys, *arguments):
    status = tool.main(list(arguments))
    return status, capsys.readouterr().out


def test_the_exercises_follow_from_the_solutions(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    status, printed = run(capsys, "--check")
    assert status == 0, printed
    files = sorted((ROOT / "exercises").rglob("*.*"))
    assert [file.name for file in files if re.search("SOLUTION|### STUB", file.read_text())] == []


def test_stored_outputs_are_what_every_machine_prints():
    """Warnings go to stderr, with the path of the file that they come from."""
    wrong = {}
    for path in sorted(ROOT.glob("solutions/*/*/*.ipynb")):
        text = path.read_text()
        cells = json.loads(text)["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        found = [output["text"] for output in outputs if output.get("name") == "stderr"]
        found += ["no outputs"] * (not outputs) + [str(ROOT)] * (str(ROOT) in text)
        if found:
            wrong[path.name] = found
    assert wrong == {}


def test_both_forms_are_written_with_types_docstring_and_tags(project, capsys):
    assert run(capsys)[0] == 0
    for suffix in (".md", ".ipynb"):
        _, install, answer, check, ways = jupytext.read(project / "exercises" / "start" / f"a{suffix}").cells
        assert install.metadata["tags"] == ["remove-cell", "install"]
        assert 'os.chdir(f"{home}/exercises/start")' in install.source
        assert answer.source.splitlines()[-1] == '    raise NotImplementedError("your code")'
        assert answer.source.startswith('def double(x: int) -> int:\n    """Return twice x."""')
        assert (answer.metadata.tags, check.metadata.tags) == (["answer-a-1"], ["check-a-1"])
        assert ways.source == "Back to the chapter: [Title](../../book/start/a.md)"
    assert run(capsys, "--check")[0] == 0


def test_an_exercise_leads_to_those_before_and_after_it(project, capsys):
    (project / "solutions" / "start" / "b").mkdir()
    (project / "solutions" / "start" / "b" / "b.md").write_text(PAGE.replace("# Title", "# Exercises: Other"))
    run(capsys)
    first, second = (jupytext.read(project / "exercises" / "start" / f"{name}.md").cells[-1].source for name in "ab")
    assert first.endswith(" · Next exercises: [Other](b.md)")
    assert second.startswith("Previous exercises: [Title](a.md) · Back to the chapter: [Other](../../book/start/b.md)")


def test_a_stub_replaces_the_solution_where_there_is_one():
    source = "### BEGIN SOLUTION\nx = 1\n### STUB\n# if x:\n#     x = 2  # keep\n### END SOLUTION\ny = x"
    assert tool.strip_solution(source, "here") == "if x:\n    x = 2  # keep\ny = x"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n### BEGIN SOLUTION\nx", "here, line 2: ### BEGIN SOLUTION without ### END SOLUTION"),
        ("x\n### END SOLUTION", "here, line 2: ### END SOLUTION without ### BEGIN SOLUTION"),
        ("### STUB", "here, line 1: ### STUB without"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n", "here, line 2: ### BEGIN SOLUTION again"),
        ("### BEGIN SOLUTIONS", "is no marker"),
        ("x = 1  ### BEGIN SOLUTION", "is no marker"),
    ],
)
def test_unbalanced_markers_are_refused_with_their_line(source, message):
    with pytest.raises(tool.Refused, match=message):
        tool.strip_solution(source, "here")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    ### END SOLUTION\n", "", "cell 1, line 3: ### BEGIN SOLUTION without"),
        (":tags: [answer-a-1]\n", "", "cell 1: a cell with a solution needs one tag"),
        (
            "    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION\n",
            "    return 2 * x\n",
            "would be handed out",
        ),
        ("check-a-1", "check-a-2", "followed by its own check-X"),
    ],
)
def test_a_slip_is_refused_and_nothing_is_written(project, capsys, old, new, message):
    (project / "solutions" / "start" / "a" / "a.md").write_text(PAGE.replace(old, new))
    status, printed = run(capsys)
    assert status == 1
    assert message in printed
    assert not (project / "exercises").exists()


@pytest.mark.parametrize("suffix", [".md", ".ipynb"])
def test_drift_is_named_by_its_cell_with_the_remedy(project, capsys, suffix):
    run(capsys)
    path = project / "exercises" / "start" / f"a{suffix}"
    jupytext.write(jupytext.read(path), path)  # other cell ids, other bytes: formatting alone is no drift
    assert run(capsys, "--check")[0] == 0
    path.write_text(path.read_text().replace("check.a.double", "print"))
    status, printed = run(capsys, "--check")
    assert status == 1
    assert f"a{suffix}, cell 3 (code, 'check-a-1')" in printed
    assert "make exercises" in printed
    path.unlink()
    assert "is missing" in run(capsys, "--check")[1]
    (path.parent / "old.md").write_text("left over")
    assert "old.md is made by no solution" in run(capsys, "--check")[1]


def test_titles_kinds_and_minutes_come_from_the_checks():
    page = (ROOT / "solutions" / "start" / "time" / "time.md").read_text()
    assert tool.with_facts(page) == page
    first = re.search(r"^## 1\. (.*)\n\n\*(\w+), (\d+) minutes\.\*", page, re.MULTILINE)
    stale = page.replace(first[0], f"## 1. Another title\n\n*Puzzle, {int(first[3]) + 7} minutes.*")
    stale = re.sub(r"\d+ minutes in all", "1 minutes in all", stale.replace("exercises for [", "exercise for [", 1))
    assert stale != page
    assert tool.with_facts(stale) == page
    assert tool.with_facts(PAGE) == PAGE  # no topic of the course
