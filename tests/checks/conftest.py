"""What tests of checks and grading share: the cells of a solution and of its exercise, and an answer in their place."""

import re
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parents[2]


def topic_of(page):
    """The topic of a solution is what its answers are named after."""
    return re.search(r"answer-(\w+)-\d+\b", page.read_text(encoding="utf-8"))[1]


SOLUTIONS = sorted((ROOT / "solutions").glob("*/*/*.md"))
EXAMPLES = {topic_of(page): page.parent.relative_to(ROOT / "solutions").as_posix() for page in SOLUTIONS}


def path_of(topic, folder):
    """A solution has a folder of its own, an exercise lies beside the others."""
    page = ROOT / folder / EXAMPLES[topic]
    return (page / page.name if folder == "solutions" else page).with_suffix(".md")


class Book:
    """The code cells of solutions and exercises."""

    def __init__(self):
        self.cells = {
            folder: {topic: self._read(path_of(topic, folder)) for topic in EXAMPLES}
            for folder in ("solutions", "exercises")
        }

    @staticmethod
    def _read(path):
        cells = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
        return [(" ".join(cell.metadata.get("tags", [])), cell.source) for cell in cells]

    @staticmethod
    def page(topic, folder="solutions"):
        """The text of a notebook's page."""
        return path_of(topic, folder).read_text(encoding="utf-8")

    def answer(self, name, folder="solutions"):
        """The text of an answer cell."""
        return dict(self.cells[folder][name.rpartition("-")[0]])[f"answer-{name}"]

    @staticmethod
    def shown(name):
        """What the check cell of a solution's notebook printed when it was stored."""
        path = path_of(name.rpartition("-")[0], "solutions").with_suffix(".ipynb")
        (cell,) = (cell for cell in jupytext.read(path).cells if f"check-{name}" in cell.metadata.get("tags", []))
        return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")

    def text_of(self, name, answer):
        """The text of an answer: it is one, or replacements in the solution."""
        if isinstance(answer, str):
            return answer
        text = self.answer(name)
        for old, new in answer:
            assert old in text, f"{name}: {old!r} is not in the solution"
            text = text.replace(old, new)
        return text

    def arguments(self, name, text):
        """Run given cells and the answer as a notebook would; return what the check is called with."""
        from dualpipe_course.grading.evaluator import arguments_of

        topic = name.rpartition("-")[0]
        names = {"__name__": "__main__"}
        cells = self.cells["exercises"][topic]
        for source in [source for tags, source in cells if not tags] + [text]:
            exec(compile(source, f"answer-{name}", "exec"), names)
        return [ast_eval(part, names) for part in arguments_of(dict(cells)[f"check-{name}"])]

    def verdict(self, name, text):
        """What the check says of an answer, with what ranks return opened as the grader opens it."""
        from dualpipe_course.own.part import Part
        from dualpipe_course.registry import find
        from dualpipe_lab.launch import payload

        if isinstance(find(name), Part):
            with payload.data_only():
                return find(name).verdict(text)
        arguments = self.arguments(name, text)
        with payload.data_only():
            return find(name).verdict(*arguments)


def ast_eval(expression, names):
    import ast

    return eval(compile(ast.Expression(expression), "check", "eval"), names)


@pytest.fixture(scope="session")
def book():
    return Book()
