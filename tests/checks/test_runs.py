"""Cells that a page's text asks to change: they need nothing that a browser's Python does not have, and run there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from built_pages import HTML, Visit

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "_ext"))
from dp_exercises import runs_of  # noqa: E402

sys.path.pop(0)

NOTEBOOKS = {path: json.loads(path.read_bytes()) for path in sorted((ROOT / "book").rglob("*.ipynb"))}
RUNS = {str(path.relative_to(ROOT).with_suffix("")): runs_of(notebook) for path, notebook in NOTEBOOKS.items()}
RUNS = {page: runs for page, runs in RUNS.items() if runs}
ALONE = """import json, sys
sys.modules |= dict.fromkeys(("torch", "numpy", "matplotlib", "dualpipe_lab.launch"))
from dualpipe_course.in_page import run
print(json.dumps([json.loads(run(**case)) for case in json.load(sys.stdin)]))
"""


def said(cases):
    """What a Python says that has neither torch nor ranks."""
    cases = [{"before": case["before"], "cell": case["source"]} for case in cases]
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"a cell with the tag run needs what a browser's Python does not have:\n{done.stderr}"
    return json.loads(done.stdout)


def test_marked_cells_need_neither_torch_nor_ranks():
    assert len(RUNS) >= 3
    answers = said([case for runs in RUNS.values() for case in runs])
    assert not [answer for answer in answers if "Error" in answer["text"] or not answer["text"] + answer["drawing"]]
    assert any("<dp-timeline" in answer["drawing"] for answer in answers)


def test_an_error_is_told_in_words_and_with_its_line():
    [case] = RUNS["book/ep/one-f-one-b-overlap"]
    wrong = case["source"].replace('["A_F0"]', '["M_F0", "A_F0"]')
    texts = [answer["text"] for answer in said([case | {"source": code} for code in (wrong, "1 +", "1 + 1")])]
    assert texts[0].startswith("InvalidOrder: ")
    assert texts[0].endswith("of the cell\n")
    assert texts[1:] == ["SyntaxError: invalid syntax, line 1 of the cell\n", "2\n"]


@pytest.mark.browser
def test_a_reader_edits_and_runs_a_cell(browser, site):
    if not (HTML / "_static" / "python").exists() and "DUALPIPE_LAB_REQUIRE_BROWSER" not in os.environ:
        pytest.skip("the book was built without npm")
    [case] = RUNS["book/pp/one-f-one-b"]
    visit = Visit(browser, site).open("book/pp/one-f-one-b")
    cell = visit.page.locator(".cell.tag_run")
    editor, verdict, output = (cell.locator(one) for one in ("textarea", ".dp-verdict", ".cell_output"))
    assert editor.input_value() == case["source"]
    assert "python/" not in "".join(visit.page.evaluate("performance.getEntriesByType('resource').map((e) => e.name)"))
    edited = case["source"].replace("4 - 2 - rank", "3 * (3 - rank)") + "\nlab.simulate(hasty)"
    broken = case["source"].replace("4 - 2 - rank", "four - rank")
    cases = [case | {"source": code} for code in (edited, broken)]
    for changed, answer in zip(cases, said(cases), strict=True):
        editor.fill(changed["source"])
        cell.get_by_text("Run", exact=True).click()
        visit.page.wait_for_function("!document.querySelector('.tag_run button').disabled")
        assert verdict.inner_text() == answer["text"].rstrip()
        assert cell.locator("dp-timeline").count() == answer["drawing"].count("<dp-timeline")
        assert output.is_hidden()
    assert verdict.inner_text().startswith("NameError: name 'four' is not defined")
    cell.get_by_text("Reset").click()
    assert editor.input_value() == case["source"]
    assert output.is_visible()
    assert verdict.inner_text() == ""
    assert visit.complaints == []
    visit.context.close()
