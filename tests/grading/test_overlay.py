"""What of a submission counts: its answer cells, by tag, and nothing else."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from dualpipe_course.grading import notebook, protocol, submissions, worker
from dualpipe_course.grading.evaluator import arguments_of
from dualpipe_course.grading.grader import Graded, Mark
from dualpipe_course.grading.notebook import Cell, Unreadable, overlay, read
from dualpipe_course.grading.report import write_csv, write_html
from dualpipe_lab.launch import payload

ROOT = Path(__file__).parents[2]
OLD_IMPORT = "from dualpipe_lab import checks as check"
PRISTINE = [Cell("", "import x"), Cell("answer-a-1", "raise"), Cell("check-a-1", "check.a.one(one)")]


def test_the_answer_is_taken_and_everything_else_is_pristine():
    found = overlay(
        PRISTINE, [Cell("", "import y"), Cell("answer-a-1", "one = 1"), Cell("check-a-1", "print('solved')")]
    )
    (task,) = found.tasks
    assert (task.given, task.answer, task.check) == (["import x"], ["one = 1"], "check.a.one(one)")
    assert found.notes == ["check-a-1 was edited: ignored", "1 extra or edited cell: ignored"]


def test_a_notebook_of_the_time_before_the_course_was_a_package_counts_like_any_other(book):
    """Its import would get a sentence; the pristine cell stands in its place."""
    topic = "zero_2"
    pristine = [Cell(tags, source) for tags, source in book.cells["exercises"][topic]]
    saved = [Cell(cell.tag, cell.source.replace("from dualpipe_course import check", OLD_IMPORT)) for cell in pristine]
    saved = [Cell(c.tag, book.answer("zero_2-1")) if c.tag == "answer-zero_2-1" else c for c in saved]
    assert saved != pristine
    task = overlay(pristine, saved).tasks[0]
    assert OLD_IMPORT not in "".join(task.given)
    assert task.answer == [book.answer("zero_2-1")]
    assert book.verdict("zero_2-1", task.answer[0]).passed


OWN, OLD, STARTER, CHECK = "one = 1", "one = 0", *(cell.source for cell in PRISTINE[1:])
AS_SAVED = {  # the cells of an exercise as they were saved, and those that count
    "split": ([OWN, "one += 1", CHECK], [OWN, "one += 1"]),
    "an old version above": ([OLD, OWN, CHECK], [OLD, OWN]),
    "an old version below the check": ([OWN, CHECK, OLD], [OWN]),
    "the starter below the check": ([OWN, CHECK, STARTER], [OWN]),
    "a broken draft at the end": ([OWN, CHECK, "one = ["], [OWN]),
    "the starter above: it may define what the answer uses": ([STARTER, OWN, CHECK], [STARTER, OWN]),
    "the starter pasted below the answer": ([OWN, STARTER, CHECK], [OWN]),
    "the starter twice": ([STARTER, STARTER, CHECK], [STARTER]),
    "solved in a copy of both": ([OLD, CHECK, OWN, CHECK], [OLD, OWN]),
    "no check": ([OWN], [OWN]),
    "below its check only": ([CHECK, OWN], "stands below its check"),
    "no answer": ([CHECK], "there is no cell tagged answer-a-1"),
}


@pytest.mark.parametrize("case", AS_SAVED)
def test_what_stands_before_the_check_counts(case):
    sources, counts = AS_SAVED[case]
    cells = [Cell("check-a-1" if source == CHECK else "answer-a-1", source) for source in sources]
    found = overlay(PRISTINE, [PRISTINE[0], *cells])
    (task,) = found.tasks
    if isinstance(counts, str):
        assert task.answer is None
        assert counts in task.lacks
        return
    assert task.answer == counts
    assert task.untouched == (OWN not in sources)
    if (number := len(sources) - sources.count(CHECK)) > 1:
        assert f"answer-a-1 occurs {number} times: {len(counts)} of these cells count, those before the check" in (
            found.notes
        )


@pytest.mark.parametrize("kind", ["markdown", "raw"])
def test_an_answer_that_became_another_kind_of_cell_is_named_as_such(kind):
    answer = {"cell_type": kind, "source": OWN, "metadata": {"tags": ["answer-a-1"]}}
    parsed = notebook.parse(json.dumps({"cells": [answer, {"cell_type": kind, "source": "text"}]}).encode())
    (task,) = overlay(PRISTINE, parsed).tasks
    assert task.answer is None
    assert (
        task.lacks
        == f"the cell tagged answer-a-1 is a {kind.capitalize()} cell; make it a Code cell again (Esc, then Y)"
    )
    assert overlay(PRISTINE, [*parsed, PRISTINE[1], Cell("answer-a-1", OWN)]).tasks[0].answer == [STARTER, OWN]


def test_pristine_cells_are_not_noted():
    assert overlay(PRISTINE, PRISTINE).tasks[0].untouched
    assert overlay(PRISTINE, PRISTINE).notes == []


def test_what_is_no_notebook_is_named(tmp_path, subtests):
    for text in [
        "",
        "no json",
        "[]",
        "3",
        '{"cells": 3}',
        '{"cells": [3]}',
        '{"cells": [{"cell_type": "code"}]}',
        "[" * 100_000,
    ]:
        with subtests.test(text=text[:20]):
            (tmp_path / "a.ipynb").write_text(text)
            with pytest.raises(Unreadable, match="no notebook of format 4"):
                read(tmp_path / "a.ipynb")


def test_binary_and_huge_files_are_no_notebooks(tmp_path, monkeypatch):
    (tmp_path / "a.ipynb").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Unreadable):
        read(tmp_path / "a.ipynb")
    monkeypatch.setattr(notebook, "MAX_BYTES", 2)
    with pytest.raises(Unreadable, match="larger than"):
        read(tmp_path / "a.ipynb")


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = None


def test_plain_answers_arrive_as_they_are(subtests):
    for value in [3, 1.5, "a", True, None, ..., [1, [2]], (1, "b", (...,)), []]:
        with subtests.test(value=value):
            assert protocol.unpack(json.loads(json.dumps(protocol.pack(value)))) == value


@pytest.mark.parametrize("value", [Liar(3), [Liar(3)], {1: 2}, object(), b"x"])
def test_other_answers_arrive_as_strangers(value):
    arrived = protocol.unpack(protocol.pack(value))
    assert type(arrived).__name__ == type(value).__name__
    assert arrived != value


def test_a_function_stays_sealed_in_the_evaluator():
    sealed = protocol.unpack(protocol.pack(lambda: print("run")))
    with pytest.raises(TypeError, match="runs on ranks only"):
        sealed()
    opens, (data,) = sealed.__reduce__()
    assert opens is protocol.open_on_rank  # which guards its process, so it is not called here
    assert callable(payload.loads(data))


@pytest.mark.parametrize("packed", [{}, [], 3, {"plain": {"list": 3}}, {"plain": {"what": []}}, {"function": 3}])
def test_forged_answers_are_refused(packed):
    with pytest.raises(ValueError, match="something else"):
        protocol.unpack(packed)


def run_cell(title, source, names):
    with asyncio.Runner() as runner:
        return worker.run_cell(title, source, names, runner)


def test_cells_share_a_loop_that_runs_as_in_a_notebook():
    """A task starts without an `await`, and a later cell waits for it; `asyncio.run` is refused, as in JupyterLab."""
    names = {}
    with asyncio.Runner() as runner:
        start = (
            "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 3\ntask = asyncio.create_task(f())"
        )
        assert worker.run_cell("one", start, names, runner) == ""
        assert worker.run_cell("two", "%time x = 1", names, runner) == ""
        assert worker.run_cell("three", "value = await task", names, runner) == ""
        assert names["value"] == 3
        own_loop = "waits = f()\ntry:\n    asyncio.run(waits)\nfinally:\n    waits.close()"
        assert "cannot be called from a running event loop" in worker.run_cell("four", own_loop, names, runner)


def test_a_cell_runs_as_in_a_notebook():
    names = {}
    assert run_cell("cell", "x = 1\n%timeit -n1 -r1 x\nif x:\n    !ls\ny = 2", names) == ""
    assert names["y"] == 2
    assert run_cell("cell", "z = 3\nraise ValueError('no')", names) == "cell, line 2: ValueError: no"
    assert names["z"] == 3
    assert run_cell("cell", "import sys; sys.exit()", names) == "cell left with sys.exit()"
    assert "SyntaxError" in run_cell("cell", "a = = 3", names)


R = "bytes_sent = [40, 40, 32]"
NOTEBOOK_CELLS = {  # each of them defines `bytes_sent` in JupyterLab
    "time statement": f"%time {R}",
    "time above": f"%%time\n{R}",
    "capture": f"%%capture\n{R}",
    "timeit beside": f"%timeit -n1 -r1 1 + 1\n{R}",
    "matplotlib": f"%matplotlib inline\n{R}",
    "pip": f"%pip install torch\n{R}",
    "shell line": f"!true\n{R}",
    "shell into a name": f"files = !echo a\nassert files == ['a']\n{R}",
    "magic into a name": f"here = %pwd\nassert here\n{R}",
    "help": f"{R}\nlen?",
    "help first": f"?len\n{R}",
    "in a block": f"for i in range(1):\n    %time {R}",
    "in an if": f"if True:\n    !true\n{R}",
    "bash": f"{R}\n!echo {{bytes_sent[0]}}",
    "indented": f"    x = 1\n    {R}",
    "await": f"import asyncio\nawait asyncio.sleep(0)\n{R}",
    "a name used by a magic": f"x = 3\n%timeit -n1 -r1 x + 1\n{R}",
    "a failing statement is shown, and the cell goes on or not as in JupyterLab": f"{R}\n%time 1 / 0",
    "% continues an expression": "x = (7\n  % 5)\nbytes_sent = [40, 40, 16 * x]",
    "% in a string": f's = """\n%time x\n!ls\n"""\nassert s.strip().startswith("%time"), s\n{R}',
    "a magic, and % continues an expression": "%precision 3\nx = (7\n  % 5)\nbytes_sent = [40, 40, 16 * x]",
    "a magic, and a string with !": f'%precision 3\ns = """\n! note\n"""\nassert "! note" in s\n{R}',
}


@pytest.mark.parametrize("label", NOTEBOOK_CELLS)
def test_a_cell_with_magics_defines_what_it_defines_in_jupyterlab(label, capfd):
    names = {}
    told = run_cell("cell", NOTEBOOK_CELLS[label], names)
    assert names["bytes_sent"] == [40, 40, 32]
    assert told == ("" if "1 / 0" not in NOTEBOOK_CELLS[label] else "cell, line 2: ZeroDivisionError: division by zero")


def test_a_magic_without_ipython_is_a_syntax_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython.core.inputtransformer2", None)
    assert "SyntaxError" in run_cell("cell", "%time x = 3", {})


def saved(cells):
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}).encode()


def answering(*names):
    return [{"cell_type": "code", "source": "x = 1", "metadata": {"tags": [f"answer-{name}"]}} for name in names]


def test_submissions_as_learning_systems_hand_them_out(tmp_path):
    """A byte-order mark, what macOS adds, two topics in a notebook, two forms of one name."""
    files = {
        "bom/x.ipynb": b"\xef\xbb\xbf" + saved(answering("time-1")),
        "mac/x.ipynb": saved(answering("time-1")),
        "mac/._x.ipynb": b"\x00\x05\x16\x07",
        "__MACOSX/mac/x.ipynb": b"\x00\x05\x16\x07",
        "two/x.ipynb": saved(answering("time-1", "time-3", "gpipe-4")),
        "jose\u0301/x.ipynb": saved(answering("time-1")),
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "linked").symlink_to(tmp_path / "mac")
    found = submissions.find(tmp_path, submissions.exercises(ROOT / "exercises"), tmp_path / "out")
    by_learner = {submission.learner: submission for submission in found}
    assert sorted(by_learner) == ["bom", "jos\u00e9", "linked", "mac", "two"]
    assert len(found) == 5
    assert [submission.learner for submission in found if submission.problem] == ["linked"]
    assert by_learner["two"].notebook == "time"
    assert "it answers gpipe too, which is not graded" in by_learner["two"].overlay.notes[0]


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("from dualpipe_course.whole.two_tokens import EXPECTED as a", "dualpipe_course.whole.two_tokens"),
        ("import importlib\na = importlib.import_module('dualpipe_course.whole.two_tokens')", "dualpipe_course.whole"),
        ("import dualpipe_course", "dualpipe_course"),
        ("open('/course/solutions/pp/gpipe/gpipe.md')", "solutions"),
        ("%time a = (root / 'solutions').read_text()", "solutions"),
        ("from dualpipe_course import check\ncheck.a.hint()  # two solutions", ""),
        ("from dualpipe_lab import solutions_of", ""),
    ],
)
def test_an_answer_that_names_where_the_answers_are_is_noted(answer, named):
    notes = overlay(PRISTINE, [PRISTINE[0], Cell("answer-a-1", answer), PRISTINE[2]]).notes
    assert [note.startswith(f"answer-a-1 names {named}") for note in notes] == [True] * bool(named)


def test_a_number_that_is_too_long_is_told():
    assert "too long" in protocol.pack([10**5_000])["error"]


def test_every_check_cell_calls_its_own_check(book):
    from dualpipe_course import check as checks
    from dualpipe_course.registry import find

    for cells in book.cells["exercises"].values():
        for tags, source in cells:
            if tags.startswith("check-"):
                assert arguments_of(source)
                called = eval(source.partition("(")[0], {"check": checks})
                assert called is find(tags.removeprefix("check-"))


def test_reports_show_words_as_words(tmp_path):
    mark = Mark("ranks-1", 0, 1, "wrong", "<script>alert(1)</script>", 1.0)
    results = [Graded("=cmd()", "ranks", "d", [mark], ["<b>note</b>"]), Graded("x", "", "d", [], ["no notebook"])]
    write_csv(results, tmp_path / "a.csv")
    write_html(results, tmp_path / "a.html")
    html = (tmp_path / "a.html").read_text()
    assert "<script" not in html
    assert "<b>" not in html
    assert "http" not in html
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert lines[1].startswith("'=cmd(),ranks,ranks-1,0,1,wrong")
    assert len(lines) == 3
