"""Renewals: what nobody touched is renewed, and nothing that a learner wrote is ever lost."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualpipe_course import record
from dualpipe_course.workspace.renew import fresh

PART = "1-pipeline-parallelism"
ONE, TWO, THREE = f"{PART}/s01-one.ipynb", f"{PART}/s02-two.ipynb", "2-tensors-more/s01-three.ipynb"
EXERCISES = f"{PART}/s01b-one-exercises.ipynb"
BESIDE = f"{PART}/s02-two.new.ipynb"


@pytest.fixture
def started(learner):
    learner.start()
    return learner


def update(course, text="Second edition."):
    course.page("book/pp/two", f"# Two\n\n{text}", "1 + 1")


def test_an_untouched_copy_is_renewed_without_a_word_and_nothing_is_written_where_nothing_is_new(course, started):
    def times():
        return {place: (started.path / place).stat().st_mtime_ns for place in started.files() if place != "start.md"}

    before = times()
    assert started.start() == []
    assert times() == before
    update(course)
    assert started.start() == []
    assert started.texts(TWO)[0].endswith("Second edition.")
    assert {place for place, time in times().items() if time != before[place]} == {TWO}


def test_an_edited_copy_stays_and_the_new_version_stands_beside_it_once(course, started):
    started.write(TWO, "mine")
    update(course)
    assert started.start() == [f"{TWO} is yours and stays; the course's new version is {BESIDE}"]
    assert started.texts(TWO) == ["# Two\n\nText.", "1 + 1", "mine"]
    assert started.texts(BESIDE)[0].endswith("Second edition.")
    assert started.start() == []
    update(course, "Third edition.")
    started.start()
    assert started.texts(BESIDE)[0].endswith("Third edition.")
    started.write(BESIDE, "mine too")
    update(course, "Fourth edition.")
    started.start()
    assert started.texts(BESIDE)[-1] == "mine too"
    assert started.texts(f"{PART}/s02-two.new-2.ipynb")[0].endswith("Fourth edition.")


def test_a_learner_who_takes_the_new_version_has_no_second_one(course, started):
    started.write(TWO, "mine")
    update(course)
    started.start()
    (started.path / BESIDE).replace(started.path / TWO)
    started.write(TWO, "", ran="once")
    assert started.start() == []
    update(course, "Third edition.")
    started.start()
    assert started.texts(TWO)[0].endswith("Third edition.")
    assert BESIDE not in started.files()


def test_a_copy_that_was_only_run_is_renewed_and_the_run_is_kept(course, started):
    started.write(TWO, "", ran="my numbers")
    assert started.start() == []
    assert "my numbers" in (started.path / TWO).read_text()
    update(course)
    (line,) = started.start()
    assert line.startswith(f"{TWO} is renewed; what you ran is old/{PART}/s02-two.")
    assert "my numbers" in (started.path / line.rpartition(" ")[2]).read_text()
    assert started.texts(TWO)[0].endswith("Second edition.")


def test_a_deleted_copy_comes_back_and_a_renamed_one_stays(started):
    (started.path / ONE).unlink()
    started.write(TWO, "mine")
    (started.path / TWO).rename(started.path / PART / "my two.ipynb")
    assert started.start() == []
    assert {ONE, TWO, f"{PART}/my two.ipynb"} <= set(started.files())
    assert started.texts(f"{PART}/my two.ipynb")[-1] == "mine"


def test_edited_copies_follow_the_course_s_order_and_new_chapters_come(course, started):
    started.write(TWO, "mine")
    (started.path / "2-tensors-more" / "s01-first.ipynb").write_text("my own notes, no notebook at all")
    course.page("book/pp/first", "# First")
    course.list(part0=["pp/first", "pp/two", "pp/one"])
    course.list(part1=["pp/first", "tp/three"])
    course.list(part0=["pp/two", "pp/one"])
    lines = started.start()
    assert f"{TWO} is now {PART}/s01-two.ipynb, as the course has a new order" in lines
    assert (started.path / "2-tensors-more" / "s01-first.ipynb").read_text() == "my own notes, no notebook at all"
    assert started.texts("2-tensors-more/s01-first.new.ipynb") == ["# First"]
    assert started.texts(f"{PART}/s01-two.ipynb")[-1] == "mine"
    assert [place for place in started.files() if place.startswith(PART)] == [
        f"{PART}/{name}.ipynb" for name in ("s01-two", "s02-one", "s02b-one-exercises")
    ]


def test_a_chapter_that_the_course_drops_goes_unless_it_was_edited(course, started):
    started.write(TWO, "mine")
    course.list(part0=["pp/one"], part1=[])
    assert started.start() == [f"{TWO} is no longer in the course; your file stays"]
    assert started.texts(TWO)[-1] == "mine"
    assert THREE not in started.files()
    assert not (started.path / THREE).parent.exists()


@pytest.mark.parametrize("text", ["", '{"book/pp/two": {"place": "', "[1]", '{"book/pp/two": 3}', "\x00"])
def test_without_its_record_every_file_counts_as_the_learner_s(course, started, text):
    started.write(TWO, "mine")
    (started.path / record.FOLDER / record.COPIES).write_text(text)
    assert started.start() == [f"{TWO} is yours and stays; the course's new version is {BESIDE}"]
    assert started.texts(TWO)[-1] == "mine"
    course.page("book/pp/one", "# One, again")
    started.start()
    assert started.texts(ONE)[0] == "# One, again"  # the others are known again


def test_a_renewal_that_cannot_write_loses_nothing_and_the_next_one_goes_on(course, started, monkeypatch):
    started.write(TWO, "mine")
    course.page("book/pp/one", "# One, again")
    course.page("book/tp/three", "# Three, again")
    replaced, real = [], os.replace

    def refuse(source, target):
        replaced.append(target)
        if len(replaced) > 1:
            raise OSError(errno.EROFS, "Read-only file system", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="Read-only"):
        started.start()
    monkeypatch.undo()
    assert started.texts(TWO)[-1] == "mine"
    assert started.start() == []
    assert (started.texts(ONE)[0], started.texts(THREE)[0]) == ("# One, again", "# Three, again")


def test_two_renewals_at_once_make_the_same_as_one(learner, started):
    expected = {place: started.texts(place) for place in started.files() if place.endswith(".ipynb")}
    learner.path = learner.path.with_name("together")
    with ThreadPoolExecutor(4) as pool:
        assert [lines for lines in pool.map(lambda _: learner.start(), range(4)) if lines] == []
    assert {place: learner.texts(place) for place in learner.files() if place.endswith(".ipynb")} == expected
    assert not list(learner.path.rglob("*.unfinished"))


def test_a_page_that_was_run_in_the_checkout_is_somebody_s_work(course, learner):
    """Before there were copies, people worked in the tracked notebooks."""
    answer = [nbformat.v4.new_output("stream", text="right")]
    course.page("exercises/pp/one", "# Exercises: One", "answer = 42", tags=["answer-gpipe-4"], outputs=answer)
    saved = course.path / "exercises" / "pp" / record.FOLDER / record.FILE
    saved.parent.mkdir()
    saved.write_text(json.dumps({"gpipe-4": {"solved": True, "attempts": 2, "hints": 0}}))
    learner.start()
    assert record.load(learner.path) == {"gpipe-4": record.Entry(True, 2, 0)}
    course.page("exercises/pp/one", "# Exercises: One", "answer = ...", tags=["answer-gpipe-4"])
    learner.start()
    assert learner.texts(EXERCISES)[-1] == "answer = 42"


def test_fresh_gives_out_again_and_keeps_what_was_there(course, started):
    started.write(TWO, "mine")
    update(course)
    started.start()
    lines = fresh(course.path, started.path, "two").lines
    assert lines[0].startswith(f"{TWO} is kept as old/{PART}/s02-two.")
    assert started.texts(lines[0].rpartition(" ")[2])[-1] == "mine"
    assert started.texts(TWO)[0].endswith("Second edition.")
    assert BESIDE not in started.files()
    assert fresh(course.path, started.path, "pp/two").lines[0].endswith("-2.ipynb")  # a day's second backup
    assert started.start() == []


def test_fresh_names_what_is_near_a_wrong_name(course, started):
    assert fresh(course.path, started.path, "one-exercises").lines[0].startswith(f"{EXERCISES} is kept as")
    with pytest.raises(ValueError, match="no chapter is called 'thre'; choose "):
        fresh(course.path, started.path, "thre")
    course.page("book/tp/two", "# Two")
    course.list(part1=["tp/two", "tp/three"])
    with pytest.raises(ValueError, match="several chapters are called 'two'; choose book/pp/two, book/tp/two"):
        fresh(course.path, started.path, "two")
    assert fresh(course.path, started.path, "tp/two").lines[-1].startswith("2-tensors-more/s01-two.ipynb is as")


OPERATIONS = ("edit", "run", "delete", "rename", "record", "update", "drop", "order", "start")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 30)), min_size=3, max_size=10))
def test_whatever_happens_every_sentence_of_the_learner_is_found(tmp_path_factory, course, learner, steps):
    learner.path = tmp_path_factory.mktemp("any")
    course.__init__(course.path)
    learner.start()
    written = []
    for number, (what, which) in enumerate(steps):
        files = [place for place in learner.files() if place.endswith(".ipynb")]
        place = files[which % len(files)]
        if what in ("edit", "run"):
            sentence = f"sentence {number};"
            written.append(sentence)
            learner.write(place, sentence if what == "edit" else "", ran=sentence)
        elif what == "delete" and not any(sentence in (learner.path / place).read_text() for sentence in written):
            (learner.path / place).unlink()
        elif what == "rename":
            (learner.path / place).rename((learner.path / place).with_name(f"my {number}.ipynb"))
        elif what == "record":
            (learner.path / record.FOLDER / record.COPIES).write_text("{")
        elif what == "update":
            update(course, f"Edition {which % 3}.")
        elif what in ("drop", "order"):
            course.list(part0=["pp/two", "pp/one"] if what == "order" else ["pp/one"])
        learner.start()
        assert [sentence for sentence in written if sentence not in learner.everything()] == []
