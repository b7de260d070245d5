"""Boxes, folds and predictions of the learner's own trainer: small pages, built and opened in a browser."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat.v4 as nb
import pytest
from built_pages import DESK, LOOKS, Visit, serious_defects

from dualpipe_course.own.parts import PARTS
from dualpipe_course.registry import TOPICS
from dualpipe_course.workspace.own import Exercise, code_lines, exercise_of, way_to
from dualpipe_lab.viz import play

ROOT = Path(__file__).parents[1]
CONF = """import sys
sys.path.insert(0, {ext!r})
extensions, exclude_patterns = ["myst_nb", "dp_own"], ["jupyter_execute", "out"]
myst_enable_extensions, myst_heading_anchors = ["colon_fence"], 2
nb_execution_mode, html_theme, project = "off", "sphinx_book_theme", "The course"
html_static_path, html_css_files, html_favicon = [{assets!r}], ["dp/book.css"], {icon!r}
html_context = {{"default_mode": "auto"}}
"""
BOOK = "book/start"
BOX = """# One

Text.

:::{write} ring
Five functions, *one* ring.

- `all_reduce`
:::

```{ours} ring Sums <on> a ring
```

```{ours} data
```

:::{lock} sum-1
How many **numbers**?
:::
"""
RING = '"""Sums."""\n\n\ndef ring(x):\n    """Sum x."""\n    return x  # all of it\n'
FOLD, OUTPUT = "details.dp-ours", ".cell_output"


def notebook(*cells):
    """A page with the outputs that it has."""
    return nb.writes(nb.new_notebook(cells=list(cells), metadata={"language_info": {"name": "python"}}))


def cell(source, **output):
    return nb.new_code_cell(source, outputs=[nb.new_output("display_data", output)] if output else [])


def pages():
    """The files of a small course."""
    live = play("gpipe", num_ranks=(2, 4), num_microbatches=(2, 4)).to_html()
    predicted = nb.new_markdown_cell(":::{lock} live\nWhich cost?\n:::")
    printed = {"text/plain": "twelve", "text/html": "<b>twelve</b>"}
    second = [nb.new_markdown_cell("# Two\n\n```{ours} ring\n```"), predicted, cell("live", **{"text/html": live})]
    assets = ROOT / "book" / "_assets"
    return {
        "conf.py": CONF.format(ext=str(ROOT / "_ext"), assets=str(assets), icon=str(assets / "dp" / "mark.svg")),
        "index.md": "# Index\n\n```{toctree}\nbook/start/one\nbook/start/two\nexercises/start/ranks\n```\n",
        "book/start/one.ipynb": notebook(nb.new_markdown_cell(BOX), cell("12", **printed), cell("13", **printed)),
        "book/start/two.ipynb": notebook(*second),
        "exercises/start/ranks.md": "# Exercises\n\n## Part `ring`: Sums on a ring\n\n`answer-ranks-1`\n",
        "dualpipe_ours/ring.py": RING,
        "dualpipe_ours/data.py": "x = 1\ny = 1\n",
        "_ext/in_page.txt": "none-1\n",
    }


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def build(root):
    """Build the course; return what the builder says."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", ".", "out"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=os.environ)
    return done.returncode, done.stdout + done.stderr


def page_of(root, name):
    return (root / "out" / f"{BOOK}/{name}.html").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("course")
    write(root, pages())
    status, words = build(root)
    assert status == 0, words
    return root


def test_the_box_has_a_title_and_a_link_with_the_minutes(built):
    box = re.search(r'<div class="dp-write admonition">(.*?)</div>', page_of(built, "one"), re.DOTALL)[1]
    text = re.sub(r"<[^>]*>", "", box).split("\n")
    minutes = exercise_of(ROOT, "ring").about.minutes
    assert text[1] == "Now you write it: mine/ring.py"
    assert f"The exercise: Sums on a ring, {minutes} minutes, worked on in the notebook." in text
    assert 'href="../../exercises/start/ranks.html#part-ring-sums-on-a-ring"' in box
    assert "<em>one</em>" in box


def test_a_part_without_a_check_or_a_page_is_named_all_the_same():
    assert way_to(Exercise("", "", None), "held", "book/whole/x") == "The exercise: part `held`."
    found = way_to(Exercise("exercises/pp/x", "", None), "held", "book/whole/x", ", there")
    assert found == "The exercise: [part `held`](../../exercises/pp/x.md), there."
    assert all(exercise_of(ROOT, part).page for part, topic in PARTS.items() if topic in TOPICS)


def test_ours_is_a_fold_of_the_text_with_its_lines_of_code(built):
    folds = re.findall(r'<details class="dp-ours"><summary>(.*?)</summary>(.*?)</details>', page_of(built, "one"), re.S)
    assert [title for title, _ in folds] == ["Ours: Sums &lt;on&gt; a ring, 2 lines", "Ours: data, 2 lines"]
    assert 'class="highlight-python' in folds[0][1]
    assert re.sub(r"<[^>]*>", "", folds[0][1]).replace("&quot;", '"').strip() == RING.strip()
    assert code_lines('class A:\n    """Why.\n\n    So."""\n\n    x = """a\nb"""  # two\n') == 3


def test_a_prediction_is_its_question_and_pages_without_one_load_nothing(built):
    page = page_of(built, "one")
    assert re.search(r'<div class="dp-lock admonition" id="lock-sum-1">\s*<p class="admonition-title">A guess', page)
    assert "own.js" in page
    assert "own.js" not in (built / "out" / "exercises" / "start" / "ranks.html").read_text()
    assert len((ROOT / "_ext" / "own.js").read_text().splitlines()) < 150


def test_what_a_page_shows_of_other_files_makes_it_read_again(built):
    def words():
        box = re.search(r"(worked|written) \w+ [\w ]*notebook", page_of(built, "one"))[0]
        return box, re.findall(r"Ours: [^<]*", page_of(built, "two"))

    def times():
        return {name: (built / "out" / f"{BOOK}/{name}.html").stat().st_mtime_ns for name in ("one", "two")}

    def rebuilt(files):
        before = times()
        write(built, files)
        status, words = build(built)
        assert status == 0, words
        return {name for name, time in times().items() if time != before[name]}

    name = exercise_of(ROOT, "ring").about.name
    assert words() == ("worked on in the notebook", ["Ours: ring, 2 lines"])
    assert rebuilt({"_ext/in_page.txt": name}) == {"one"}
    assert words()[0] == "written in that page or in the notebook"
    assert rebuilt({"dualpipe_ours/ring.py": RING + "\ny = 1\n"}) == {"one", "two"}
    assert words()[1] == ["Ours: ring, 3 lines"]
    assert rebuilt({"dualpipe_ours/data.py": "x = 2\ny = 1\n"}) == {"one"}
    assert rebuilt(pages()) == {"one", "two"}


@pytest.mark.parametrize(
    ("text", "cells", "words"),
    [
        ("```{ours} rings\n```", [], "there is no part 'rings'; parts are memory, ring,"),
        (":::{lock} a\nHow many?\n:::", [cell("x = 1"), cell("1", **{"text/plain": "1"})], "shows nothing"),
        (":::{lock} a\nHow many?\n:::", [], "no code cell comes after this prediction"),
    ],
)
def test_a_wrong_directive_stops_the_build(tmp_path, text, cells, words):
    wrong = {"book/start/two.ipynb": notebook(nb.new_markdown_cell(f"# Two\n\n{text}"), *cells)}
    write(tmp_path, pages() | wrong)
    status, said = build(tmp_path)
    assert status == 1
    assert words in said


def test_no_two_predictions_of_the_book_have_one_name():
    names = [name for page in ROOT.glob("book/**/*.md") for name in re.findall(r"\{lock\} +(\S+)", page.read_text())]
    assert sorted(set(names)) == sorted(names)


# ---- in a browser

browser_only = pytest.mark.browser
ONE, TWO = f"{BOOK}/one", f"{BOOK}/two"
# what the theme alone gets wrong is repaired in the real book (dp_weight)
RULES = ["color-contrast", "label", "button-name", "summary-name", "nested-interactive", "aria-allowed-attr"]
INERT = """() => [...document.querySelectorAll("dp-live, dp-live dp-timeline")]
  .flatMap(e => [...e.shadowRoot.querySelectorAll(".costs")]).map(e => e.inert)"""


@pytest.fixture(scope="module")
def address(built, serve):
    with serve(built / "out") as address:
        yield address


@pytest.fixture
def visit(browser, address):
    visit = Visit(browser, address, is_reading=False)
    yield visit
    assert visit.complaints == []
    visit.context.close()


@browser_only
def test_an_output_is_folded_until_the_guess_which_stays_beside_it(visit):
    page = visit.open(ONE).page
    first, other = page.locator(OUTPUT).first, page.locator(OUTPUT).nth(1)
    assert (first.is_visible(), other.is_visible()) == (False, True)
    page.get_by_label("Your guess").fill(" eleven <b> ")
    page.keyboard.press("Enter")
    for _ in range(2):
        assert first.is_visible()
        assert page.locator(".dp-lock form").is_hidden()
        said = page.get_by_text("You guessed eleven <b>")
        assert said.is_visible()
        assert said.evaluate("e => e.nextElementSibling.matches('.cell_output')")
        visit.open(ONE)
    kept = page.evaluate("Object.entries(localStorage).filter(([key]) => key.startsWith('dualpipe-lab'))")
    assert kept == [["dualpipe-lab:guess:sum-1", "eleven <b>"]]


@browser_only
def test_skipping_is_one_click_or_two_keys(visit):
    page = visit.open(ONE).page
    page.get_by_label("Your guess").focus()
    page.keyboard.press("Enter")  # an empty guess is none
    assert page.locator(OUTPUT).first.is_hidden()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator(OUTPUT).first.is_visible()
    assert page.evaluate("document.activeElement.textContent") == "You skipped the guess."


@browser_only
def test_a_live_cell_is_there_and_its_controls_wait(visit):
    page = visit.open(TWO).page
    assert page.locator("dp-live").is_visible()
    assert len(page.evaluate(INERT)) == 2
    assert all(page.evaluate(INERT))
    page.get_by_role("button", name="Skip").click()
    assert not any(page.evaluate(INERT))


@browser_only
def test_one_switch_opens_everything_on_all_pages_and_shuts_it_again(visit):
    page = visit.open(TWO).page
    reading, writing = (page.get_by_role("button", name=name) for name in ("I am reading", "I write myself"))
    assert page.get_by_text("Open all folds and predictions?").is_visible()
    assert page.locator(f".dp-reading + {FOLD}").count() == page.locator(".dp-reading").count() == 1
    reading.click()
    assert page.locator(f"{FOLD}[open]").count() == 1
    assert not any(page.evaluate(INERT))
    visit.open(ONE)
    assert page.locator(f"{FOLD}[open]").count() == 2
    assert page.locator(OUTPUT).first.is_visible()
    assert page.get_by_text("How many numbers?").is_visible()
    assert page.locator(".dp-lock form").is_hidden()
    assert reading.get_attribute("aria-pressed") == "true"
    writing.click()
    assert page.locator(f"{FOLD}[open]").count() == 0
    assert page.locator(OUTPUT).first.is_hidden()
    assert page.get_by_text("Open all folds and predictions?").count() == 0


@browser_only
def test_on_paper_and_without_scripts_everything_is_there(browser, visit):
    page = visit.open(ONE).page
    page.emulate_media(media="print")
    code = page.locator(f"{FOLD} pre").first
    assert code.evaluate("e => e.checkVisibility({ contentVisibilityAuto: true })")
    assert code.bounding_box()["height"] > 50
    assert page.locator(OUTPUT).first.is_visible()
    assert page.locator(".dp-reading:visible, .dp-lock form:visible").count() == 0
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(f"{visit.site}{ONE}.html")
    assert plain.locator(OUTPUT).first.is_visible()
    assert plain.locator(".dp-reading, .dp-lock form").count() == 0
    plain.locator(f"{FOLD} summary").first.click()
    assert plain.locator(f"{FOLD} pre").first.is_visible()
    context.close()


@browser_only
@pytest.mark.parametrize("path", [ONE, TWO])
def test_they_fit_in_every_look_and_can_be_read_by_everybody(visit, path):
    visit.open(path)
    visit.page.locator(f"{FOLD} summary").first.click()
    for viewport, scheme in LOOKS:
        visit.look(viewport, scheme)
        assert visit.sticking_out() == [], (viewport["width"], scheme)
    for scheme in ("light", "dark"):
        visit.look(DESK, scheme)
        assert serious_defects(visit.page, runOnly=RULES) == []
