"""Code cells of the book's pages, and the statements that one of them needs, found by the names that it uses."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

BOOK = Path(__file__).parents[1] / "book"
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SETTINGS = ("set_default_dtype", "manual_seed", "set_num_threads", "set_printoptions")


class Cell(NamedTuple):
    """One code cell: its tags, the line of its first statement in the page, its code."""

    tags: tuple[str, ...]
    line: int
    code: str


def cells(page):
    """The code cells of a page, in order."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in CELL.finditer(text):
        options = re.match(r"(?::[^\n]*\n|---\n.*?^---\n)*\n*", match[1], re.MULTILINE | re.DOTALL)
        named = re.search(r"tags:\s*\[([^\]]*)\]", options[0])
        tags = tuple(tag.strip() for tag in named[1].split(",")) if named else ()
        line = text[: match.start(1) + options.end()].count("\n") + 1
        found.append(Cell(tags, line, match[1][options.end() :]))
    return found


def starts_ranks(page):
    """Whether a cell of the page launches ranks, the cell for NCCL aside."""
    return any(re.search(r"\blaunch\(", cell.code) for cell in cells(page) if "nccl" not in cell.tags)


def program(page):
    """The page's cell for NCCL after the statements before it that it needs, as one module; None without a cell."""
    earlier = []
    for cell in cells(page):
        module = ast.parse(cell.code, str(page))
        ast.increment_lineno(module, cell.line - 1)  # so that a traceback shows the page's own line
        if "nccl" in cell.tags:
            return ast.Module(needed(earlier, module.body) + module.body, type_ignores=[])
        earlier += module.body
    return None


def needed(statements, using):
    """The statements that bind or change a name that `using`, or one of them, uses; and the settings of torch."""
    wanted, bound, chosen, more = set(), set(), [], [None]
    for statement in using:
        wanted |= names_used(statement) - bound
        bound |= names_bound(statement)
    while more:
        more = [one for one in statements if one not in chosen and (names_bound(one) & wanted or is_setting(one))]
        chosen += more
        wanted |= set().union(*map(names_used, more))
    return [one for one in statements if one in chosen]


def names(node, context):
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}


def names_used(node):
    """Names of the module that a statement reads, now or in functions that are called later."""
    if isinstance(node, ast.Name):
        return names(node, ast.Load)
    found = set().union(*map(names_used, ast.iter_child_nodes(node)))
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        return found - {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)} - names(node, ast.Store)
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return found - set().union(*(names(each.target, ast.Store) for each in node.generators))
    return found - names(node.target, ast.Store) if isinstance(node, ast.For) else found


def names_bound(statement):
    """The names that a statement binds, or of which it changes an item or an attribute."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    if isinstance(statement, ast.For):
        return set().union(*map(names_bound, statement.body))  # its own variable is gone behind it
    changed = [node.value for node in ast.walk(statement) if isinstance(getattr(node, "ctx", None), ast.Store)
               and isinstance(node, ast.Attribute | ast.Subscript)]  # fmt: skip
    return names(statement, ast.Store).union(*(names(node, ast.Load) for node in changed))


def is_setting(statement):
    """Whether a statement changes a setting of torch."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in SETTINGS
