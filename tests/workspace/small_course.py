"""A small checkout of the course, and a learner who works in copies of it."""

import json

import nbformat
import yaml

from dualpipe_course.workspace.renew import renew

PAIRED = {"formats": "md:myst,ipynb"}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
TOC = """
root: book/intro.md
parts:
  - caption: Pipeline parallelism
    chapters: [{file: book/pp/one.md, sections: [{file: exercises/pp/one.md}]}, {file: book/pp/two.md}]
  - caption: Tensors, & more
    chapters: [{file: book/tp/three.md}]
  - caption: About
    chapters: [{file: book/learners.md}, {file: book/api.md}]
"""


class Course:
    """A checkout with three chapters, one with exercises."""

    def __init__(self, path):
        self.path = path
        self.page("book/intro", "# The course\n\n[three](tp/three.md)")
        self.page("book/pp/one", "# One\n\n[three](../tp/three.md#its-name), [names](../api.md), [two](two.md)")
        self.page("book/pp/two", "# Two\n\nText.", "1 + 1")
        self.page("book/tp/three", "# Three\n\n## Its name")
        self.page("exercises/pp/one", "# Exercises: One", "answer = ...", tags=["answer-gpipe-4"])
        (path / "book" / "learners.md").write_text("# For learners\n\n[one](pp/one.md)\n")
        (path / "book" / "api.md").write_text("# API\n\n```{eval-rst}\n```\n")
        (path / "_toc.yml").write_text(TOC)

    def page(self, name, text, *codes, tags=(), outputs=()):
        """Write both forms of a page."""
        cells = [nbformat.v4.new_markdown_cell(text, id="text")]
        cells.append(nbformat.v4.new_code_cell("raise SystemExit", id="install", metadata={"tags": ["install"]}))
        for number, code in enumerate(codes):
            metadata = {"tags": list(tags)}
            cells.append(nbformat.v4.new_code_cell(code, id=f"code-{number}", metadata=metadata, outputs=list(outputs)))
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"jupytext": PAIRED, "kernelspec": KERNEL})
        path = self.path / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, path)
        path.with_suffix(".md").write_text(f"{text}\n")

    def built(self, name, *codes, outputs):
        """Write what a build of a page leaves in _build."""
        built = Course.__new__(Course)
        built.path = self.path / "_build" / "jupyter_execute"
        built.page(name, "as Sphinx read it", *codes, outputs=outputs)

    def list(self, **chapters):
        """Change the contents: part number -> names of chapters."""
        table = yaml.safe_load((self.path / "_toc.yml").read_text())
        for part, names in chapters.items():
            table["parts"][int(part.removeprefix("part"))]["chapters"] = [{"file": f"book/{name}.md"} for name in names]
        (self.path / "_toc.yml").write_text(yaml.safe_dump(table))


class Learner:
    """Somebody with copies of a course."""

    def __init__(self, course, path):
        self.course, self.path = course, path

    def start(self):
        """Run the renewal of `make lab`; return its sentences."""
        return renew(self.course.path, self.path).lines

    def files(self):
        found = (path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
        return sorted(path.as_posix() for path in found if not path.parts[0].startswith("."))

    def notebook(self, place):
        return json.loads((self.path / place).read_text())

    def write(self, place, text, ran=""):
        """Write a sentence into a notebook, or run it."""
        notebook = self.notebook(place)
        if text:
            notebook["cells"].append({"cell_type": "markdown", "id": "own", "metadata": {}, "source": text})
        notebook["metadata"].setdefault("runs", []).append(ran)
        (self.path / place).write_text(json.dumps(notebook))

    def texts(self, place):
        return ["".join(cell["source"]) for cell in self.notebook(place)["cells"]]

    def everything(self):
        """The text of all files, wherever they are."""
        return "\n".join((self.path / place).read_text() for place in self.files())
