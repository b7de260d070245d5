"""The start page: where to go on, what is solved, what is new; and the commands around it."""

import errno
import os

import pytest
from cli.shell import output, run

from dualpipe_course import record
from dualpipe_course.grading import submissions
from dualpipe_course.workspace import contents, given, lab, start_page

TWO = "1-pipeline-parallelism/s02-two.ipynb"
EXERCISES = "1-pipeline-parallelism/s01b-one-exercises.ipynb"


@pytest.fixture
def started(course, learner, monkeypatch):
    monkeypatch.setattr(lab, "trust", lambda folder, data: None)
    course.page("exercises/pp/one", "# Exercises: One", "answer = ...", tags=["check-gpipe-4"])
    learner.start()
    return learner


def page(learner):
    return (learner.path / "start.md").read_text()


def test_a_new_learner_is_led_to_the_first_chapter(started):
    assert "**Begin with [One](1-pipeline-parallelism/s01-one.ipynb).**" in page(started)
    assert f"[One](1-pipeline-parallelism/s01-one.ipynb) | [exercises]({EXERCISES}) | □ 0 of 1 |" in page(started)
    assert "0 of 1 exercises are solved." in page(started)


def test_the_page_touched_last_comes_first_and_what_is_solved_leads_on(course, started, monkeypatch):
    started.write(TWO, "", ran="now")
    started.start()
    assert f"**Go on with [Two]({TWO}).** You were there last, on " in page(started)
    started.write(EXERCISES, "my answer")
    os.utime(started.path / EXERCISES, (2e9, 2e9))
    monkeypatch.chdir((started.path / EXERCISES).parent)
    record.note("gpipe-4", True)  # as a check does in a notebook: one record for the whole folder
    assert [path.relative_to(started.path).as_posix() for path in started.path.rglob(record.FILE)] == [
        f"{record.FOLDER}/{record.FILE}"
    ]
    folder = given.Folder(started.path)
    start_page.write(folder, contents.read(course.path), ["something"], False)
    folder.save()
    start_page.update(course.path, started.path)  # as the check that passed does
    assert f"**Go on with [Two]({TWO}).** Exercises: One is solved" in page(started)
    assert "## New since the last start\n\n- something\n" in page(started)
    assert not (started.path / "old").exists()
    started.start()
    assert f"**Go on with [Two]({TWO}).** Exercises: One is solved" in page(started)
    assert "| ■ 1 of 1 |" in page(started)
    assert "1 of 1 exercises are solved." in page(started)


def test_what_a_learner_writes_into_the_start_page_is_kept(started):
    (started.path / "start.md").write_text("my plan for the week")
    started.start()
    assert "my plan for the week" in started.everything()
    assert page(started).startswith("# The course")


def test_the_command_tells_what_it_did(course, started):
    folder = f"--to={started.path}"
    told = output("lab", "--copies-only", folder, f"--course={course.path}", columns=200)
    assert told.endswith(f"==> 6 pages in {started.path}, 0 of them with results\n")
    assert f"{TWO} is kept as old/" in output("fresh", "two", folder, f"--course={course.path}", columns=200)


def test_without_notebooks_or_a_folder_to_write_one_sentence_says_so(course, started, monkeypatch, tmp_path):
    refused = run("lab", "--copies-only", f"--course={tmp_path / 'nowhere'}", f"--to={tmp_path / 'new'}")
    assert refused.exit_code == 1
    assert "name a checkout: dualpipe-lab lab --course FOLDER" in refused.stderr

    def refuse(*names):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    there = run("lab", "--copies-only", f"--to={started.path}", f"--course={course.path}")
    assert (there.exit_code, there.stderr) == (
        0,
        f"{started.path} cannot be written (Read-only file system): nothing is renewed\n",
    )
    refused = run("lab", "--copies-only", f"--to={tmp_path / 'new'}", f"--course={course.path}")
    assert refused.exit_code == 1
    assert "(Read-only file system); name another: --to FOLDER" in refused.stderr


def test_a_jupyterlab_that_runs_already_is_named_and_left_alone(course, started, monkeypatch):
    monkeypatch.setattr(lab, "running", lambda folder: "http://127.0.0.1:1/lab")
    course.page("book/pp/two", "# Two, again")
    told = output("lab", f"--to={started.path}", f"--course={course.path}", columns=200)
    assert "runs on" in told
    assert "http://127.0.0.1:1/lab" in told
    assert started.texts(TWO)[0] == "# Two\n\nText."


def test_the_grader_takes_a_whole_folder_of_copies(course, started, tmp_path):
    course.page("exercises/pp/one", "# Exercises: One", "answer = ...", tags=["answer-gpipe-4"])
    started.start()
    submitted = tmp_path / "submissions" / "maria"
    submitted.mkdir(parents=True)
    started.path.rename(submitted / "my-course")
    known = {"gpipe": [submissions.Cell("answer-gpipe-4", "answer = ..."), submissions.Cell("check-gpipe-4", "")]}
    found = submissions.find(tmp_path / "submissions", known, tmp_path / "out")
    assert [(one.learner, one.notebook, one.problem) for one in found] == [("maria", "gpipe", "")]
