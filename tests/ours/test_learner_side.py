"""What the learner has: cell and file, the course's parts in place of missing ones, marks that can be taken back."""

import subprocess
import sys

import nbformat
import pytest

from dualpipe_course import check, record
from dualpipe_course.exercise import CheckFailed
from dualpipe_course.own import finder, folder, part
from dualpipe_course.own.parts import PARTS, VERSIONS
from dualpipe_course.workspace.renew import fresh, renew

RING = finder.official("ring").replace("from .", "from mine.")


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A learner's folder, in which a notebook runs."""
    (tmp_path / record.FOLDER).mkdir()
    (tmp_path / record.FOLDER / record.COPIES).write_text("{}")
    folder.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder, "_in_memory", {})
    monkeypatch.setattr(folder, "_said", set())
    monkeypatch.setattr(part, "_show_ours", lambda name: None)
    yield tmp_path
    finder.forget()


def passing(text, **options):
    """Call the check of the ring, which is judged elsewhere: here it accepts what defines all_reduce."""
    ring = check.ranks.ring
    judge, ring.judge = ring.judge, lambda *answers, seed=None: "accepted"
    try:
        ring(text, **options)
    finally:
        ring.judge = judge


def test_a_cell_that_passes_becomes_the_file_and_the_package(course, capsys):
    assert folder.state("ring") == "missing"
    import mine.ring

    assert "mine.ring is not written yet: the course's own runs" in capsys.readouterr().out
    assert mine.ring.__file__ == "mine/ring.py"
    passing(RING + "\nMINE = 1\n")
    assert (course / "mine" / "ring.py").read_text() == RING + "\nMINE = 1\n"
    assert folder.state("ring") == "own"
    from mine.data import all_reduce as used  # the course's part, over the learner's

    assert used.__globals__["MINE"] == 1
    assert "parts of your trainer 1 of 29" in check.progress().summary()


def test_what_was_there_goes_to_old_and_an_edited_file_is_no_pass(course, capsys):
    passing(RING)
    passing(RING + "# again\n")
    assert [path.read_text() for path in (course / "mine" / "old").iterdir()] == [RING]
    file = course / "mine" / "ring.py"
    file.write_text(RING + "EDITED = True\n")
    assert folder.state("ring") == "edited"
    finder.forget()
    import mine.ring

    assert not hasattr(mine.ring, "EDITED")
    assert "mine.ring is edited and not checked" in capsys.readouterr().out
    with pytest.raises(CheckFailed, match='take="file" judges the file, take="cell" the cell'):
        passing(RING + "# third\n")
    assert file.read_text() == RING + "EDITED = True\n"
    passing(None, take="file")
    assert folder.state("ring") == "own"
    file.write_text(RING)
    passing(RING + "# third\n", take="cell")
    assert file.read_text() == RING + "# third\n"
    with pytest.raises(ValueError, match='use take="cell" or take="file"'):
        passing(RING, take="both")


def test_a_part_for_an_older_signature_keeps_its_file_and_the_course_s_runs(course, monkeypatch, capsys):
    passing(RING + "OLD = 1\n")
    monkeypatch.setitem(VERSIONS, "ring", 2)
    assert folder.state("ring") == "older"
    import mine.ring

    assert not hasattr(mine.ring, "OLD")
    assert "written for an older signature" in capsys.readouterr().out


def test_an_unreadable_record_makes_every_part_unchecked(course):
    passing(RING)
    (course / "mine" / folder.PASSED).write_text("[")
    assert folder.state("ring") == "edited"
    (course / "mine" / folder.PASSED).write_text('{"ring": 3}')
    assert folder.state("ring") == "edited"


def test_nothing_is_written_while_nbval_runs(course, monkeypatch):
    monkeypatch.setattr(record, "is_compared", lambda: True)
    passing(RING + "IN_MEMORY = 1\n")
    assert [path.name for path in (course / "mine").iterdir()] == ["__init__.py"]
    import mine.ring

    assert mine.ring.IN_MEMORY == 1


def test_a_renewal_leaves_the_package_alone(course):
    from workspace.small_course import Course

    checkout = course / "checkout"
    checkout.mkdir()
    small = Course(checkout)
    passing(RING)
    kept = {path: path.read_bytes() for path in (course / "mine").rglob("*") if path.is_file()}
    renew(small.path, course)
    fresh(small.path, course, "one")
    assert {path: path.read_bytes() for path in (course / "mine").rglob("*") if path.is_file()} == kept
    page = (course / "start.md").read_text()
    assert "![1 of 29 parts are yours: ring](trainer.svg)" in page
    assert (course / "trainer.svg").read_text().count("<rect") == 1 + len(PARTS) + 4


def test_a_program_imports_the_package_from_its_folder(course):
    passing(RING + "MINE = 7\n")
    script = (
        "import sys; sys.path.insert(0, '.'); from mine.ring import MINE; from mine.data import num_tokens; print(MINE)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=course, check=True)
    assert done.stdout.splitlines()[-1] == "7"


CELLS = (
    "import dualpipe_lab as lab\nfrom dualpipe_course import check, own\nfrom dualpipe_course.own import folder",
    "def keep(number):\n"
    "    folder.keep('memory', f'NUMBER = {number}\\n\\n\\ndef rank_bytes():\\n    return NUMBER\\n')\n"
    "    from dualpipe_course.own import finder\n    finder.forget()",
    "keep(1)\nfrom mine.memory import rank_bytes\n"
    "print(rank_bytes(), list(lab.launch(lambda rank, size: rank_bytes(), 2)))",
    "keep(2)\nfrom mine.memory import rank_bytes\n"
    "print(rank_bytes(), list(lab.launch(lambda rank, size: rank_bytes(), 2)))",
)


@pytest.mark.parametrize("start", ["", "spawn"])
def test_kernel_and_ranks_see_an_edit_between_two_launches(course, monkeypatch, start):
    from nbclient import NotebookClient

    monkeypatch.setenv("DUALPIPE_LAB_START", start)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(course)}}).execute()
    shown = [cell.outputs[-1].text for cell in notebook.cells if cell.outputs]
    assert shown == ["1 [1, 1]\n", "2 [2, 2]\n"]


def test_nbval_in_a_learner_s_folder_changes_no_byte(course):
    cells = [*CELLS[:1], f"x = '''{RING}'''\ncheck.ranks.ring.judge = lambda *a, seed=None: 'ok'\ncheck.ranks.ring(x)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, course / "one.ipynb")
    (course / record.FOLDER / record.FILE).write_text("{}")
    before = {path: path.read_bytes() for path in course.rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--nbval-lax"]
    done = subprocess.run([*command, "one.ipynb"], capture_output=True, text=True, cwd=course, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    after = {path: path.read_bytes() for path in course.rglob("*") if path.is_file()}
    assert {path: data for path, data in after.items() if ".ipynb_checkpoints" not in path.parts} == before


def test_a_run_prints_how_far_it_is_and_whose_parts_it_called_and_the_start_page_knows(course, capsys):
    from workspace.small_course import Course

    checkout = course / "checkout"
    checkout.mkdir()
    renew(Course(checkout).path, course)
    passing(RING)
    capsys.readouterr()
    check.run("experts")
    first, second, third = capsys.readouterr().out.splitlines()
    others = "column, block, softmax, ring_attention, exchange, moe, router"
    assert first == f"the course's own run for {others}"
    assert second.startswith("experts: equal to one process; the largest difference in losses, first gradients and ")
    assert third == "yours: 1 of the 8 parts that it calls: ring"
    assert record.load()["runs-3"].solved
    with pytest.raises(ValueError, match="there is no run all; use one of dense, pipeline, experts, together"):
        check.run("all")


def test_a_run_by_a_wrong_part_says_what_is_off(course):
    passing(RING.replace("step - 1", "step"))
    with pytest.raises(CheckFailed, match=r"run experts: experts, 2 rank.*is off by"):
        check.run("experts")
    assert "runs-3" not in record.load()
