"""The copies: in reading order, with links that work, folded as the book folds, with the outputs of the build."""

import re

import nbformat
from small_course import KERNEL

from dualpipe_course.workspace import contents
from dualpipe_course.workspace.pages import plain

ONE, TWO = "1-pipeline-parallelism/s01-one.ipynb", "1-pipeline-parallelism/s02-two.ipynb"
EXERCISES, THREE = "1-pipeline-parallelism/s01b-one-exercises.ipynb", "2-tensors-more/s01-three.ipynb"
RESULT = nbformat.v4.new_output("execute_result", {"text/plain": "2"}, execution_count=1)


def test_files_stand_in_reading_order_without_pages_beside_them(learner):
    assert learner.start() == []
    assert learner.files() == sorted(
        [
            ONE,
            EXERCISES,
            TWO,
            THREE,
            "AGENTS.md",
            "about/learners.md",
            "intro.ipynb",
            "mine/__init__.py",
            "start.md",
            "trainer.svg",
        ]
    )


def test_a_copy_is_paired_with_nothing_and_has_no_cell_for_colab(learner):
    learner.start()
    notebook = learner.notebook(TWO)
    assert notebook["metadata"] == {"kernelspec": KERNEL, "dualpipe_lab": {"page": "book/pp/two"}}
    assert learner.texts(TWO) == ["# Two\n\nText.", "1 + 1"]
    three = "[three](../2-tensors-more/s01-three.ipynb#Its-name)"
    assert learner.texts(ONE)[0].endswith(f"{three}, names, [two](s02-two.ipynb)")  # the builder's pages have no copy


def test_what_the_book_folds_is_folded(course, learner):
    hidden = {"source_hidden": True}
    for tag, folded in (("hide-input", hidden), ("hide-cell", hidden | {"outputs_hidden": True}), ("nccl", None)):
        course.page("book/pp/two", "# Two", "1 + 1", tags=[tag])
        learner.start()
        assert learner.notebook(TWO)["cells"][1]["metadata"].get("jupyter") == folded


def test_a_build_fills_the_copies_that_are_there_already(course, learner):
    learner.start()
    assert "The notebooks show no results yet" in (learner.path / "start.md").read_text()
    course.built("book/pp/two", "1 + 1", outputs=[RESULT])
    assert learner.start() == []
    cell = learner.notebook(TWO)["cells"][1]
    assert (cell["outputs"][0]["data"], cell["execution_count"]) == ({"text/plain": ["2"]}, None)
    assert "no results yet" not in (learner.path / "start.md").read_text()
    course.page("book/pp/two", "# Two", "1 + 2")  # the build has not run this code
    learner.start()
    assert learner.notebook(TWO)["cells"][1]["outputs"] == []


def test_blocks_of_the_book_become_markdown():
    hidden = ":::{admonition} Answer\n:class: dropdown\n\nSix.\n:::"
    assert plain(hidden) == "<details><summary>Answer</summary>\n\nSix.\n\n</details>"
    assert plain("::::{grid} 1 1 3\n:gutter: 3\n\n:::{grid-item-card} Door\nIn.\n:::\n::::") == "**Door**\n\nIn."
    assert plain("```{glossary}\nrank\n  One process.\n```") == "rank\n  One process.\n"
    assert plain("```python\n:::\n```") == "```python\n:::\n```"


BOX = """# One

:::{write} ring
Five functions.

- `all_reduce`
:::

```{ours} ring Sums on a ring
```

:::{lock} sum
How many?

Count **bytes**.
:::"""
COPIED = '''# One

> **Now you write it: `mine/ring.py`**
>
> Five functions.
>
> - `all_reduce`
>
> The exercise: [Sums on a ring](s01b-one-exercises.ipynb#Part-ring%3A-Sums-on-a-ring), 60 minutes.

<details><summary>Ours: Sums on a ring, 2 lines</summary>

```python
"""Sums."""

x = 1
y = 2
```

</details>

> **A guess first**
>
> How many?
>
> Count **bytes**.
>
> *The next cell is folded: guess, then open it.*'''


def test_what_asks_for_a_part_is_a_quotation_and_the_cell_after_a_guess_is_folded(course, learner):
    course.page("book/start/one", BOX, "12", "13")
    course.page("exercises/start/one", "# Exercises\n\n## Part `ring`: Sums on a ring", "1", tags=["answer-ranks-4"])
    exercises = course.path / "exercises" / "start" / "one.md"
    exercises.write_text(exercises.read_text() + "```{code-cell}\n:tags: [answer-ranks-4]\n```\n")
    (course.path / "dualpipe_ours").mkdir()
    (course.path / "dualpipe_ours" / "ring.py").write_text('"""Sums."""\n\nx = 1\ny = 2\n')
    toc = (course.path / "_toc.yml").read_text()
    (course.path / "_toc.yml").write_text(toc.replace("/pp/one", "/start/one"))
    learner.start()
    assert learner.texts(ONE) == [COPIED, "12", "13"]
    cells = learner.notebook(ONE)["cells"]
    assert [cell["metadata"].get("jupyter") for cell in cells[1:]] == [
        {"source_hidden": True, "outputs_hidden": True},
        None,
    ]


def test_a_cell_that_the_book_leaves_out_is_not_what_a_guess_is_about(course, learner):
    course.page("book/pp/two", ":::{lock} sum\nHow many?\n:::", "import x", "13", tags=["remove-cell"])
    path = course.path / "book" / "pp" / "two.ipynb"
    notebook = nbformat.read(path, 4)
    notebook.cells[-1].metadata = {}
    nbformat.write(notebook, path)
    learner.start()
    assert learner.notebook(TWO)["cells"][-1]["metadata"]["jupyter"]["outputs_hidden"] is True


def test_a_page_of_the_trail_has_its_number_and_the_trail_is_read_first(course):
    toc = (course.path / "_toc.yml").read_text()
    lists = "meta: {trail: [book/tp/three.md, book/pp/two.md], lecture: [book/pp/one.md]}\n"
    (course.path / "_toc.yml").write_text(toc + lists)
    read = contents.read(course.path)
    assert [chapter.page.place for chapter in read.chapters()] == [
        "2-tensors-more/01-three.ipynb",
        "1-pipeline-parallelism/02-two.ipynb",
        "1-pipeline-parallelism/s01-one.ipynb",
    ]
    assert [chapter.number for chapter in read.chapters()] == [1, 2, None]
    assert [chapter.in_lecture for chapter in read.chapters()] == [False, False, True]


def test_every_page_of_the_real_course_is_given_out_and_every_link_of_a_copy_leads_to_a_copy(tmp_path, learner):
    learner.course.path = contents.Path(__file__).parents[2]
    learner.start()
    places = [page.place for page in contents.read(learner.course.path).pages()]
    assert len(places) == len(set(places)) > 90
    for part in contents.read(learner.course.path).parts:
        inside = [page.place for one in part.chapters for page in (one.page, one.exercises) if page]
        assert inside == sorted(inside)
    assert sum(place.endswith("-exercises.ipynb") for place in places) >= 46
    links = 0
    for place in places:
        folder = (learner.path / place).parent
        text = (learner.path / place).read_text() if place.endswith(".md") else "\n".join(learner.texts(place))
        for target in re.findall(r"\]\(([^)\s:#`]+\.(?:md|ipynb))", text):
            links += 1
            assert (folder / target).is_file(), f"{place} links {target}"
        assert not re.search(r"^:::", text, re.MULTILINE), place
    assert links > 300
