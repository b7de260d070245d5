"""Python in a page: it judges exercises and answers the studio as the notebook's does, and asks nothing of others."""

import json
import multiprocessing
import os
import random
import re
from pathlib import Path

import pytest
from built_pages import HTML, Visit
from right_answers import RIGHT
from wrong_answers import CHEATS, TYPICAL

from dualpipe_course.in_page import judge
from dualpipe_course.personal import personal
from dualpipe_course.registry import find
from dualpipe_lab.launch import operating_system
from dualpipe_lab.pp import InvalidProgram, Program, schedules, validate
from dualpipe_lab.pp.studio import answer, as_json

ROOT = Path(__file__).parents[2]
NAMES = (ROOT / "_ext" / "in_page.txt").read_text().split()
ALL = """async ([site, cases]) => {
  const worker = new Worker(`${site}_static/dp/python-worker.mjs`, { type: "module" });
  const told = [];
  return await new Promise((resolve, reject) => {
    worker.onerror = () => reject("the worker did not start: make book");
    worker.onmessage = ({ data }) => {
      if (data.error) reject(data.error);
      if (data.id !== null) told[data.id] = data.text;
      const id = data.id === null ? 0 : data.id + 1;
      if (id === cases.length) resolve(told);
      else worker.postMessage({ id, call: "judge", args: [cases[id].before, cases[id].answer, cases[id].check] });
    };
  });
}"""


def answers(book):
    """All answers that are stored of these exercises, but those that need what a browser's Python does not have."""
    for name in NAMES:
        others = [*RIGHT.get(name, {}).values()]
        others += [bad.answer for table in (TYPICAL, CHEATS) for bad in table[name].values()]
        for text in [book.answer(name), *(book.text_of(name, other) for other in others)]:
            if not re.search(r"(?:import|from) (?:torch|numpy)|\b(?:torch|np)\.", text):
                yield name, text


def given(book, name):
    """The cells before an exercise, and its check."""
    cells = book.cells["exercises"][name.rpartition("-")[0]]
    tags = [tag for tag, _ in cells]
    before = [text for tag, text in cells[: tags.index(f"answer-{name}")] if not tag]
    return {"before": before, "check": dict(cells)[f"check-{name}"]}


def said_here(queue, cases):
    """Judge in one process, as a page does."""
    operating_system.NAME = "emscripten"
    queue.put([judge(**case) for case in cases])


@pytest.fixture
def python(site):
    """The built book, if it has Python for the browser."""
    if not (HTML / "_static" / "python").exists() and "DUALPIPE_LAB_REQUIRE_BROWSER" not in os.environ:
        pytest.skip("the book was built without npm")
    return site


@pytest.mark.browser
def test_a_page_says_what_the_notebook_says(book, browser, python):
    site = python
    stored = list(answers(book))
    cases = [{**given(book, name), "answer": text} for name, text in stored]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=said_here, args=(queue, cases))
    process.start()
    page = browser.new_page()
    page.goto(f"{site}genindex.html")
    there = page.evaluate(ALL, [site, cases])
    page.close()
    here = queue.get(timeout=120)
    process.join()
    wrong = [one for one in zip(stored, here, there, strict=True) if one[1] != one[2]]
    assert not wrong, json.dumps([sorted({name for (name, _), *_ in wrong}), *wrong[:3]], indent=1)
    assert len(NAMES) >= 60
    assert len(stored) > 5 * len(NAMES)
    solved = [
        json.loads(text)["verdict"]
        for (name, answer), text in zip(stored, here, strict=True)
        if answer == book.answer(name)
    ]
    assert [text.partition(" solved: ")[0] for text in solved] == [find(name).shown for name in NAMES]


@pytest.mark.browser
@pytest.mark.parametrize("name", ["pp/interleaved", "pp/easy-dualpipe", "whole/sums"])  # plain text, code
def test_a_reader_has_numbers_of_their_own_and_hands_them_in(browser, python, name):
    site, page = python, browser.new_page()
    page.goto(f"{site}genindex.html")
    page.evaluate("localStorage.setItem('dualpipe-lab:seed', '4711')")
    page.goto(f"{site}exercises/{name}.html")
    notebook = json.loads((ROOT / "exercises" / f"{name}.ipynb").read_bytes())
    tags = [tag for cell in notebook["cells"] for tag in cell["metadata"].get("tags", ())]
    checks = [find(tag.removeprefix("check-")) for tag in tags if tag.startswith("check-")]
    text = page.locator("article").first.inner_text()
    for variants in [check.variants for check in checks if check.variants]:
        assert [text.count(sentence) for sentence in variants.sentences(4711)] == [1] * len(variants.sentences(4711))
    assert "The numbers of predict exercises are drawn for you." in text
    assert re.search(r"To work on it in JupyterLab: make lab, then [\w/-]+-exercises\.ipynb", text)
    with page.expect_download() as handed:
        page.get_by_text("Download as notebook").click()
    downloaded = json.loads(Path(handed.value.path()).read_bytes())
    page.close()
    personal(notebook, 4711)
    cells = [["".join(cell["source"]) for cell in one["cells"]] for one in (downloaded, notebook)]
    assert cells[0] == cells[1]
    assert downloaded["metadata"]["dualpipe_lab"]["seed"] == 4711


def questions():
    """What a studio asks: verdicts on broken orders of every kind, and on all schedules in all forms."""
    rng = random.Random(1)
    costs = {"F": 2, "I": 1, "W": 1, "B": None, "overlap": None, "latency": 1, "transfer": 1}
    for name in schedules.names(synchronous=True):
        program = schedules.build(name, 4, 8)
        for form in ("text", "csv", "comms", "python", "trace"):
            yield {"ask": "write", "form": form, "program": as_json(program), "costs": costs}
        yield {"ask": "why", "program": as_json(program), "costs": costs, "rank": 2, "position": 3}
        for _ in range(12):
            rows = [list(row) for row in program.ranks]
            row, other = rng.choice(rows), rng.choice(rows)
            step = row.pop(rng.randrange(len(row)))
            if rng.random() < 0.9:  # else it is missing
                target = row if rng.random() < 0.8 else other
                target.insert(rng.randint(0, len(target)), step)
            yield {"ask": "verdict", "program": as_json(program.with_ranks(rows)), "costs": costs, "limit": 6}


ASK = """async (asked) => {
  const said = [];
  for (const question of asked) said.push(await dualpipePython.ask("studio", [question]));
  return said;
}"""


@pytest.mark.browser
def test_the_studio_s_page_answers_to_the_letter(browser, python):
    visit = Visit(browser, python).open("book/pp/studio")
    page, asked = visit.page, [json.dumps(question) for question in questions()]
    assert "python/" not in "".join(page.evaluate("performance.getEntriesByType('resource').map((one) => one.name)"))
    there = page.evaluate(ASK, asked)
    here = [answer(question) for question in asked]
    assert [pair for pair in zip(here, there, strict=True) if pair[0] != pair[1]][:1] == []
    assert sum('"deadlock' in text for text in here) > 20
    page.evaluate("document.querySelector('dp-studio').act('start', { name: '1f1b', ranks: 8, microbatches: 20 })")
    program = schedules.build("1f1b", 8, 20)
    row = program.rows()[0].replace(" 0B0", "").replace("0F0", "0F0 0B0")
    took = page.evaluate(
        "async (row) => { const e = document.querySelector('dp-studio'); await e.settled; e.act('retype', row);"
        " await e.settled; return e.took; }",
        row,
    )
    broken = program.with_ranks([*Program.parse("", [row]).ranks, *program.ranks[1:]])
    with pytest.raises(InvalidProgram) as refused:
        validate(broken)
    assert page.locator("dp-studio .problems li").all_inner_texts() == list(refused.value.problems)
    assert took < 1000  # 150 ms where nothing else runs
    assert [words for words in visit.complaints if words.startswith("fetched")] == []
    visit.context.close()
