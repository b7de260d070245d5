"""What a part may import and call, read from its syntax tree.

In: a text, and what is off in its part.  Out: nothing, or `Wrong` with the line.
A part imports torch, the standard library, earlier parts and of `comm` six functions; it defines the names of its
contract.
"""

import ast
import sys
from collections.abc import Iterator, Sequence

from dualpipe_course.own.finder import PACKAGE
from dualpipe_course.own.parts import before
from dualpipe_course.wrong import Wrong

COMM = ("isend", "irecv", "send", "recv", "get_rank", "get_world_size", "Work")
EVERYWHERE = ("torch.distributed", "torch.nn.parallel", "importlib", "builtins", "__import__", "eval", "exec")
AUTOGRAD = (  # where the backward is written by hand
    *("torch.autograd.grad", "torch.autograd.backward", "torch.enable_grad", "torch.set_grad_enabled", "torch.func"),
    *("torch.autograd.functional", ".backward"),
)
ATTENTION = ("torch.nn.functional.scaled_dot_product_attention", "torch.nn.attention")
_ALLOWED = (
    f"a part may import torch, the standard library, earlier parts and, of dualpipe_lab.comm, {', '.join(COMM[:-1])}"
)


def check_text(part: str, text: str, names: Sequence[str], off: Sequence[str] = ()) -> None:
    """Raise `Wrong` unless a text is Python, keeps to the rules and defines the names."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Wrong(f"line {error.lineno}: {error.msg}") from None
    top = [statement for statement in tree.body if isinstance(statement, ast.Import | ast.ImportFrom)]
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if node not in top and not _is_for_types(tree, node):
                raise Wrong(f"line {node.lineno}: imports stand at the top of the file, one inside fails on a rank")
            for name, dotted in _imported(node):
                _check_import(part, dotted, node.lineno)
                known[name] = dotted
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (dotted := _dotted(node.value, known)).startswith("torch"):
            known |= {target.id: dotted for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute | ast.Name | ast.Call):
            _check_use(part, node, known, off)
    if missing := [name for name in names if name not in set(_defined(tree))]:
        raise Wrong(f"the text does not define {', '.join(missing)}: one cell, or one file, is the whole part")


def _check_import(part: str, dotted: str, line: int) -> None:
    root, _, rest = dotted.partition(".")
    if root == PACKAGE:
        other = rest.partition(".")[0]
        if not other or other in before(part):
            return
        raise Wrong(f"line {line}: {PACKAGE}.{other} is not before {part}; a part imports earlier ones alone")
    if root in ("dualpipe_ours", "dualpipe_course"):
        raise Wrong(f"line {line}: {root} is the course's own; {_ALLOWED}")
    if root == "dualpipe_lab":
        if dotted == "dualpipe_lab.comm" or dotted.removeprefix("dualpipe_lab.comm.") in COMM:
            return
        raise Wrong(f"line {line}: {dotted} is the library's; {_ALLOWED}")
    if root != "torch" and root not in sys.stdlib_module_names:
        raise Wrong(f"line {line}: {root} is none of what a part imports; {_ALLOWED}")
    if rest.endswith("*") and not dotted.startswith("torch.distributed"):
        raise Wrong(f"line {line}: a star hides what is used; import by name")


def _check_use(part: str, node: ast.AST, known: dict[str, str], off: Sequence[str]) -> None:
    assert isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute | ast.Name | ast.Call)
    if isinstance(node, ast.Attribute | ast.Name | ast.Call):
        uses = [_dotted(node, known)]
    else:
        uses = [dotted for _, dotted in _imported(node)]
    for dotted in uses:
        for one in (*EVERYWHERE, *off):
            is_method = one.startswith(".") and isinstance(node, ast.Attribute) and f".{node.attr}" == one
            if is_method or dotted == one or dotted.startswith(f"{one}."):
                why = "in every part" if one in EVERYWHERE else f"in {part}: it is what you write here"
                raise Wrong(f"line {node.lineno}: {one} is off {why}")
        if dotted.startswith("dualpipe_lab.comm.") and dotted.split(".")[2] not in COMM:
            raise Wrong(f"line {node.lineno}: {dotted.removeprefix('dualpipe_lab.')} is the library's; {_ALLOWED}")


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The names that an import binds, each with what it stands for."""
    for one in node.names:
        if isinstance(node, ast.Import):
            yield (one.asname, one.name) if one.asname else (one.name.partition(".")[0],) * 2
            if not one.asname:
                yield one.name, one.name
        else:
            package = PACKAGE if node.level else ""
            yield one.asname or one.name, ".".join(filter(None, [package, node.module, one.name]))


def _dotted(node: ast.expr, known: dict[str, str]) -> str:
    """`F.softmax` and `getattr(F, "softmax")` as `torch.nn.functional.softmax`; of other expressions nothing."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        value = _dotted(node.value, known)
        return f"{value}.{node.attr}" if value else ""
    match node:  # by a name that is written down; one that is computed may be that of a type
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
            found = _dotted(owner, known)
            return f"{found}.{name}" if found else ""
    return ""


def _defined(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name
        for node in ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _is_for_types(tree: ast.Module, node: ast.AST) -> bool:
    """Whether an import stands in `if TYPE_CHECKING:` at the top."""
    return any(
        isinstance(one, ast.If)
        and isinstance(one.test, ast.Name)
        and one.test.id == "TYPE_CHECKING"
        and node in one.body
        for one in tree.body
    )
