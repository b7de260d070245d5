"""The cells of the lecture table by eight promises, read from the sources (nothing is imported or run).

Usage: lecture_table.py [ROOT] [--markdown]      exit 1 if a promise that every cell must keep is broken

chapter   the page is in _toc.yml, and the map of book/intro.md links it in the column of its axis
notebook  an .ipynb beside the .md, with as many code cells
gloo      calls of `launch(` in code cells that every reader runs (not the NCCL cell), while the library's server takes
          its processes from torch.multiprocessing
library   names of the axis' own package (or its schedules and models) that those cells import and use
exercise  graded questions (`check-...` cells) of the exercise notebook; the solution's notebook has stored outputs
backward  p: the page writes one: an autograd.Function with a backward (delays excluded), or a function `backward`,
          `..._backward`, `input_grad`, `weight_grad` that computes or sends and does not ask autograd; in dp also code
          that reads `.grad` (or hooks into it) and calls a collective or sends; of official parts that it shows, too
          l: the page uses a library name from a module that does so, or runs a schedule whose backward is split (I, W)
          Pages in NO_BACKWARD have none of their own: files, an optimizer, a collective, orders of whole backwards
nccl      one cell tagged `nccl`, guarded by `nccl_ready(`
widget    i: a live cell (`play(`: ipywidgets in a running notebook, every size in the HTML)
          t: a drawing that plays in notebook and HTML without ipywidgets (timeline, comparison, message steps)
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = {
    "dp": (
        "data-parallel", "dp-gradients", "distributed-adam", "zero-1", "zero-2", "zero-3", "mixed-precision-adam", "io",
    ),
    "tp": (
        "column-parallel", "row-parallel", "swiglu", "gqa", "lm-head", "embedding", "rmsnorm", "cross-entropy",
    ),
    "pp": (
        "gradient-checkpointing", "pp-basic", "gpipe", "pipedream", "zero-bubble", "easy-dualpipe", "dualpipe",
    ),
    "cp": ("ring-all-reduce", "softmax", "online-softmax", "ring-softmax", "flash-attention", "ring-attention"),
    "ep": (
        "all-to-all", "async-all-to-all", "topk-gradient", "smoe", "gshard", "one-f-one-b-basic", "one-f-one-b-overlap",
        "v3-moe",
    ),
}  # fmt: skip
COLUMNS = ("chapter", "notebook", "gloo", "library", "exercise", "backward", "nccl", "widget")
EVERYWHERE = ("chapter", "notebook", "gloo", "library", "exercise", "nccl")
PIPELINES = {*(f"pp/{page}" for page in TABLE["pp"]), "ep/one-f-one-b-basic", "ep/one-f-one-b-overlap"}
NO_BACKWARD = {"dp/io", "dp/distributed-adam", "cp/ring-all-reduce", "pp/gpipe", "pp/pipedream", "pp/easy-dualpipe"}
# what counts as the axis' own library besides dualpipe_lab.<axis>
OWN: dict[str, set[str]] = {
    "pp": {"schedules", "PipelineRuntime", "Program", "validate", "simulate", "build", "lower", "Cost"},
    "dp": {"data"},
    "tp": set(),
    "cp": set(),
    "ep": set(),
}
PLAYS, STEPS = {"compare", "simulate", "Timeline"}, {"Steps", "steps", "Steps.of_run"}
MESSAGES = re.compile(
    r"^(all_|reduce|isend|irecv|send|recv|broadcast|exchange|start_)|_grad$|matmul|einsum|index_add_|^[A-Z]_B$"
)
NAME = re.compile(
    r"^backward$|_backward$|^(input|weight|grouped|descend)_grad$|_(input|weight)_grad$|^gradients_by_hand$"
)
SPLIT = {"zero_bubble_h1", "zero_bubble_h2", "dualpipe", "dualpipev", "zbv"}
HOOK = "register_post_accumulate_grad_hook"


class Cell(NamedTuple):
    """A code cell: its tags and its syntax tree."""

    tags: set[str]
    tree: ast.Module


def code_cells(notebook: Path) -> list[Cell]:
    """Return the code cells of a notebook; magics count as nothing."""
    cells = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            source = "\n".join("pass" if line.startswith(("%", "!")) else line for line in lines)
            cells.append(Cell(set(cell["metadata"].get("tags", ())), ast.parse(source)))
    return cells


def nodes_of(trees: list[ast.Module]) -> Iterator[ast.AST]:
    """Every node of several cells."""
    return (node for tree in trees for node in ast.walk(tree))


def calls_in(node: ast.AST) -> list[ast.Call]:
    """Every call below a node."""
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def called(node: ast.AST) -> str:
    """The last name of what a call calls: `launch` of `lab.launch(...)`."""
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


# ---- the library's names on a page


def imported(trees: list[ast.Module]) -> dict[str, str]:
    """Names that the cells import from the library, each with its module."""
    found = [
        (alias.asname or alias.name, f"{node.module}.{alias.name}")
        for node in nodes_of(trees)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualpipe_lab")
        for alias in node.names
    ]
    return dict(found)


def own_names(axis: str, trees: list[ast.Module]) -> set[str]:
    """Names of the axis' own package that are imported and used, and attributes of `lab` and of the package."""
    names, used, found = imported(trees), set(), set()
    for node in nodes_of(trees):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            package = node.value.id
            if names.get(package) == f"dualpipe_lab.{axis}" or (package == "lab" and node.attr in OWN[axis]):
                found.add(node.attr)
    return found | {
        name
        for name, path in names.items()
        if name in used and (path.startswith(f"dualpipe_lab.{axis}.") or name in OWN[axis])
    }


# ---- backward by hand


def asks_autograd(node: ast.AST) -> bool:
    """Whether something below a node calls `.backward` or `.grad`."""
    return any(isinstance(c.func, ast.Attribute) and c.func.attr in ("backward", "grad") for c in calls_in(node))


def by_hand(function: ast.FunctionDef) -> bool:
    """Whether a function is a named backward that computes or sends, and does not ask autograd."""
    computes = any(isinstance(node, ast.BinOp | ast.AugAssign) for node in ast.walk(function))
    sends = any(MESSAGES.search(called(call)) for call in calls_in(function))
    return bool(NAME.search(function.name)) and not asks_autograd(function) and (computes or sends)


def is_operator(node: ast.ClassDef) -> bool:
    """Whether a class is a torch.autograd.Function with a backward that is more than a delay."""
    if not any(called(base) == "Function" for base in node.bases):
        return False
    written = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "backward"]
    return bool(written) and not any(called(call) in ("compute", "span") for call in calls_in(written[0]))


def exchanges_gradients(node: ast.AST) -> bool:
    """Whether a function or class reads `.grad` or hooks into it, and calls a collective itself."""
    reads = any(isinstance(n, ast.Attribute) and n.attr in ("grad", "grads", HOOK) for n in ast.walk(node))
    sends = any(re.match(r"all_reduce|reduce_scatter|isend", called(call)) for call in calls_in(node))
    return reads and sends and not asks_autograd(node)


def writes_backward(trees: list[ast.Module], axis: str) -> bool:
    """Whether the cells or modules write a backward by hand."""
    for node in nodes_of(trees):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            written = is_operator(node) if isinstance(node, ast.ClassDef) else by_hand(node)
            if written or (axis == "dp" and exchanges_gradients(node)):
                return True
    return False


def parts_of(root: Path, trees: list[ast.Module]) -> list[ast.Module]:
    """The official parts that the cells import, which the page shows in a fold."""
    modules = {node.module or "" for node in nodes_of(trees) if isinstance(node, ast.ImportFrom)}
    names = sorted(name.partition(".")[2] for name in modules if name.startswith("dualpipe_ours."))
    return [ast.parse((root / "dualpipe_ours" / f"{name}.py").read_text(encoding="utf-8")) for name in names]


def names_with_backward(root: Path, axis: str) -> set[str]:
    """Names of the library's axis whose own module writes a backward, and subpackages that hold such a module."""
    names = set()
    for module in sorted((root / "dualpipe_lab" / axis).rglob("*.py")):
        tree = ast.parse(module.read_text(encoding="utf-8"))
        if writes_backward([tree], axis):
            names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            if module.parent.name not in (axis, "runtime"):
                names.add(f"{axis}.{module.parent.name}")
    return names


def splits(trees: list[ast.Module]) -> bool:
    """Whether the page runs a schedule with I and W."""
    nodes = list(nodes_of(trees))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return bool(names & SPLIT) and "PipelineRuntime" in names


# ---- drawings that play


def plays(trees: list[ast.Module]) -> str:
    """The marks of the column `widget`."""
    marks, holders = set(), set()
    for node in nodes_of(trees):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and called(node.value) in PLAYS:
            holders |= {t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name)}
        if isinstance(node, ast.Call) and called(node) == "play":
            marks.add("i")
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("viz.") in STEPS:
            marks.add("t")
    last = [tree.body[-1] for tree in trees if tree.body]
    if any(isinstance(node, ast.Expr) and is_drawing(node.value, holders) for node in last):
        marks.add("t")
    return "".join(sorted(marks))


def is_drawing(shown: ast.expr, holders: set[str]) -> bool:
    """Whether the value at the end of a cell is a timeline or a comparison."""
    if isinstance(shown, ast.Call):
        return called(shown) in PLAYS
    if isinstance(shown, ast.Name):
        return shown.id in holders
    return isinstance(shown, ast.Attribute) and shown.attr == "timeline"


# ---- one row


def starts_by_torch(root: Path) -> bool:
    """Whether the library's server takes fork server and spawned processes from torch.multiprocessing."""
    server = "\n".join(path.read_text(encoding="utf-8") for path in sorted((root / "dualpipe_lab").rglob("server.py")))
    return all(
        re.search(rf"from torch\.multiprocessing import .*\b{name}\b", server) for name in ("get_context", "spawn")
    )


def is_linked(root: Path, axis: str, path: str) -> bool:
    """Whether the map of the home page links a chapter in the column of its axis, and the contents list it."""
    intro = (root / "book/intro.md").read_text(encoding="utf-8")
    header = next(line for line in intro.splitlines() if line.startswith("| DP<br>"))
    column = [cell.strip()[:2].lower() for cell in header.strip("|").split("|")].index(axis)
    rows = [line.strip("|").split("|") for line in intro[intro.index(header) :].splitlines()]
    linked = any(len(cells) == len(TABLE) and f"({path}.md)" in cells[column] for cells in rows)
    return linked and f"file: book/{path}.md" in (root / "_toc.yml").read_text(encoding="utf-8")


def num_questions(root: Path, axis: str, page: str) -> int:
    """How many graded questions a chapter's exercises have, if their solution has stored outputs."""
    exercise, solution = root / f"exercises/{axis}/{page}.ipynb", root / f"solutions/{axis}/{page}/{page}.ipynb"
    if not (exercise.exists() and solution.exists()):
        return 0
    stored = any(cell.get("outputs") for cell in json.loads(solution.read_text(encoding="utf-8"))["cells"])
    return stored * sum(any(tag.startswith("check-") for tag in cell.tags) for cell in code_cells(exercise))


def row(root: Path, axis: str, page: str) -> dict[str, str]:
    """What a chapter has in each column; empty where it has nothing."""
    path = f"{axis}/{page}"
    source, notebook = root / f"book/{path}.md", root / f"book/{path}.ipynb"
    found = dict.fromkeys(COLUMNS, "")
    found["chapter"] = "x" * (source.exists() and is_linked(root, axis, path))
    if not notebook.exists():
        return found
    cells = code_cells(notebook)
    if len(cells) == source.read_text(encoding="utf-8").count("\n```{code-cell}"):
        found["notebook"] = str(len(cells))
    trees = [cell.tree for cell in cells if not cell.tags & {"nccl", "install"}]
    launches = sum(called(call) == "launch" for tree in trees for call in calls_in(tree))
    found["gloo"] = str(launches) if launches and starts_by_torch(root) else ""
    names = own_names(axis, trees)
    found["library"] = str(len(names) or "")
    guarded = [
        any(called(call) == "nccl_ready" for call in calls_in(cell.tree)) for cell in cells if "nccl" in cell.tags
    ]
    found["nccl"] = "x" * sum(guarded)
    found["exercise"] = str(num_questions(root, axis, page) or "")
    packages = {path.rpartition(".")[0].removeprefix("dualpipe_lab.") for path in imported(trees).values()}
    library = (names | packages) & names_with_backward(root, axis) or (axis == "pp" and splits(trees))
    found["backward"] = "p" * writes_backward(trees + parts_of(root, trees), axis) + "l" * bool(library)
    found["widget"] = plays(trees)
    return found


def table(root: Path) -> dict[str, dict[str, str]]:
    """Every row, by its page."""
    return {f"{axis}/{page}": row(root, axis, page) for axis, pages in TABLE.items() for page in pages}


def broken(rows: dict[str, dict[str, str]]) -> list[str]:
    """The promises that are not kept, one line each."""
    lines = []
    for name, found in rows.items():
        wanted = [*EVERYWHERE, *["widget"] * (name in PIPELINES), *["backward"] * (name not in NO_BACKWARD)]
        lines += [f"{name}: {column}" for column in wanted if not found[column]]
        if name in PIPELINES and "i" not in found["widget"]:
            lines.append(f"{name}: widget without ipywidgets ({found['widget'] or 'none'})")
    return lines


def main(arguments: list[str]) -> int:
    """Print the table; return the exit status."""
    root = Path(next((word for word in arguments if not word.startswith("-")), Path(__file__).parents[1]))
    rows, bar = table(root), "|" if "--markdown" in arguments else " "
    print(bar.join(["page".ljust(26), *(name.ljust(8) for name in COLUMNS)]))
    if bar == "|":
        print("|".join(["---"] * (1 + len(COLUMNS))))
    for name, found in rows.items():
        print(bar.join([name.ljust(26), *((found[column] or "-").ljust(8) for column in COLUMNS)]))
    kept = (str(sum(bool(found[column]) for found in rows.values())).ljust(8) for column in COLUMNS)
    print(bar.join([f"of {len(rows)}".ljust(26), *kept]))
    lines = broken(rows)
    print("\n".join(["", "broken:", *lines] if lines else ["", "nothing broken"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
