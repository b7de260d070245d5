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
    """The statements whose names `using` uses, those whose names they use, and the settings of torch."""
    chosen, asked = set(), set()

    def want(name, before):
        """Choose the last statement before `before` that binds a name, and earlier ones if it only changes it."""
        if (name, before) in asked:
            return
        asked.add((name, before))
        binding = [number for number in range(before) if name in names_bound(statements[number])]
        if binding:
            choose(binding[-1])
            if not binds_anew(statements[binding[-1]]):
                want(name, binding[-1])

    def choose(number):
        if number not in chosen:
            chosen.add(number)
            now, later = names_used(statements[number])
            for name in now:
                want(name, number)
            for name in later:  # in the body of a function, which is called later
                want(name, len(statements))

    for number, statement in enumerate(statements):
        if is_setting(statement):
            choose(number)
    for statement in using:
        for name in set().union(*names_used(statement)):
            want(name, len(statements))
    return [statements[number] for number in sorted(chosen)]


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def names_used(node):
    """Names of the module that a statement reads where it stands, and those that its functions read when called."""
    if isinstance(node, ast.Name):
        return ({node.id} if isinstance(node.ctx, ast.Load) else set()), set()
    now, later = set(), set()
    for child in ast.iter_child_nodes(node):
        read, deferred = names_used(child)
        now |= read
        later |= deferred
    if isinstance(node, FUNCTIONS):
        outside = [*node.args.defaults, *node.args.kw_defaults, *getattr(node, "decorator_list", [])]
        defaults = set().union(*(names_used(child)[0] for child in outside if child is not None), set())
        return defaults, (now | later) - local_names(node)
    if isinstance(node, COMPREHENSIONS):
        targets = set().union(*(stored_names(generator.target) for generator in node.generators))
        return now - targets, later - targets
    return now, later


def local_names(function):
    """Parameters of a function and the names that it binds."""
    body = function.body if isinstance(function.body, list) else [function.body]
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {one.arg for one in parameters if one} | set().union(*(names_bound(child) for child in body))


def names_bound(statement):
    """The names that a statement binds, or of which it changes an item or an attribute."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    return stored_names(statement)


def stored_names(node):
    """Names that are stored to in a node, also by item or attribute, but not inside functions or comprehensions."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, *COMPREHENSIONS)):
        return {node.name} if hasattr(node, "name") else set()
    if isinstance(getattr(node, "ctx", None), ast.Store):
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        if isinstance(node, ast.Name):
            return {node.id}
    return set().union(*(stored_names(child) for child in ast.iter_child_nodes(node)), set())


def binds_anew(statement):
    """Whether a statement gives its names new values, instead of changing what they are bound to."""
    if isinstance(statement, ast.Assign):
        return not any(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
    return isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.AnnAssign)


def is_setting(statement):
    """Whether a statement changes a setting of torch."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in SETTINGS
