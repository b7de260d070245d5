"""One command makes a chapter with exercises that pass; what exists is left alone."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load
from test_book import minutes_of

ROOT = Path(__file__).parents[1]
tool = load(ROOT / "tools" / "new_chapter.py")


@pytest.fixture
def project(tmp_path, monkeypatch):
    for folder in ("dualpipe_course", "tools", "tests/checks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "book").mkdir()
    for file in ("_toc.yml", "_config.yml", "tests/scripts.py", "book/addresses.txt"):
        shutil.copy(ROOT / file, tmp_path / file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(project, *arguments):
    paths = [str(path) for path in (project, project / "tests", project / "tests" / "checks", ROOT)]
    code = f"import sys; sys.path[:0] = {paths}; " + arguments[-1] if arguments[0] == "-c" else ""
    command = [sys.executable, "-c", code] if code else [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=project)


def test_the_skeleton_passes_and_its_wrong_answers_fail(project, capsys):
    assert tool.main(["tp", "my-topic"]) == 0
    assert "solutions/tp/my-topic/wrong.py" in capsys.readouterr().out
    made = python(project, "tools/make_exercises.py")
    assert made.returncode == 0, made.stdout + made.stderr
    assert (project / "exercises" / "tp" / "my-topic.ipynb").is_file()
    judged = python(
        project,
        "-c",
        "from conftest import Book; from wrong_answers import CHEATS, TYPICAL; from dualpipe_course import check\n"
        "book = Book()\n"
        "for name in ('my_topic-1', 'my_topic-2'):\n"
        "    assert book.verdict(name, book.answer(name)).passed, name\n"
        "    for bad in [*TYPICAL[name].values(), *CHEATS[name].values()]:\n"
        "        verdict = book.verdict(name, book.text_of(name, bad.answer))\n"
        "        assert not verdict.passed and bad.says in verdict.message, (bad, verdict)\n"
        "check.my_topic.hint()",
    )
    assert judged.returncode == 0, judged.stderr
    assert "hint 1 of 2" in judged.stdout


def test_both_pages_are_listed_in_their_part(project):
    tool.make("pp", "my-topic")
    lines = (project / "_toc.yml").read_text().splitlines()
    place = lines.index("      - file: book/pp/my-topic.md")
    assert lines[place + 1 : place + 3] == ["        sections:", "          - file: exercises/pp/my-topic.md"]
    assert lines[place - 1].startswith("          - file: exercises/pp/")
    before, addresses = ((folder / "book" / "addresses.txt").read_text().split() for folder in (ROOT, project))
    assert addresses == sorted([*before, "book/pp/my-topic", "exercises/pp/my-topic"])


def test_the_skeleton_has_the_order_of_a_page_and_plausible_minutes(project):
    tool.make("tp", "my-topic")
    text = (project / "book/tp/my-topic.md").read_text()
    parts = ["You need", "hide-input", "## The smallest", "Takeaway", "## How it breaks", "## Recap", "## Going deeper"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    least, minutes, most = minutes_of(text)
    assert least <= minutes <= most


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["xp", "my-topic"], "a part is one of start, dp, tp, pp, cp, ep, got 'xp'"),
        (["tp", "My Topic"], "words in lower case with dashes"),
        (["tp", "../x"], "words in lower case with dashes"),
        (["tp", "swiglu"], "dualpipe_course/tp/swiglu.py exists already"),
        (["tp"], "usage"),
    ],
)
def test_what_cannot_be_made_is_told_and_nothing_is_written(project, capsys, arguments, message):
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    assert tool.main(arguments) == 1
    assert message in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
