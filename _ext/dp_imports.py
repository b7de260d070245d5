"""Which files of the repository the code of a page may execute: the static import graph, names of façades resolved.

In: the root of the repository and Python code.  Out: files.
  from dualpipe_lab.cp import f    the module that defines f, by the part's stub, and all that it imports in turn
  lab.cp.f                         the same
  a façade as a value, `*`         the whole part: nobody knows which names are asked for later
  an unknown name of a façade      the whole part
  code that cannot be read         everything
Imports inside functions and modules named in texts count.  A package brings its files that are no code.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("dualpipe_lab", "dualpipe_course", "dualpipe_ours")
# Its texts name the types that a rank's result may be made of: what a page returns, its own code has imported.
TYPES = "dualpipe_lab.launch.restricted"
# What runs code that the graph does not see.
OPAQUE = {"subprocess", "runpy", "get_ipython", "exec", "eval", "import_module", "__import__", "system", "popen"}


class Found(NamedTuple):
    """The files that an import of a name loads, and the module of that name if there is one."""

    needs: frozenset[str]
    module: str | None = None


class Library:
    """The packages below a root: modules, façades and what each module imports, each file read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
        self.files = {_name(path.relative_to(root)): path for path in paths}
        self._references: dict[str, _References] = {}

    @cached_property
    def stubs(self) -> dict[str, dict[str, tuple[str, str]]]:
        """Façade -> public name -> (module, name there)."""
        paths = {name: path.with_suffix(".pyi") for name, path in self.files.items() if path.stem == "__init__"}
        return {name: dict(_table(name, path)) for name, path in paths.items() if path.exists()}

    def files_of(self, code: str) -> set[Path]:
        """Return the files that a page's code may execute or show; every file if it cannot be known."""
        try:
            tree = ast.parse(code)
        except SyntaxError:  # a magic, or a command of the shell
            return self.all_files()
        if OPAQUE & {word for node in ast.walk(tree) for word in _words(node)}:
            return self.all_files()
        return self._with_data(self._closure(_References(self, "").read(tree).needs))

    def all_files(self) -> set[Path]:
        """Return every file of the packages."""
        return self._with_data(set(self.files))

    def find(self, module: str, name: str) -> Found:
        """Return what `module.name` needs."""
        table, inner = self.stubs.get(module), f"{module}.{name}"
        if table is not None and name in table:
            source, original = table[name]
            if source != module:
                found = self.find(source, original)
                return Found(found.needs | {module}, found.module)
        if inner in self.files:
            return Found(frozenset({module, inner}), inner)
        if module not in self.files:
            return Found(self.whole(module))
        if table is None or name.startswith("__"):
            bound = self.references(module).modules.get(name, set()) if table is None else set()
            return Found(frozenset({module}), *sorted(bound)[:1])
        return Found(self.whole(module))

    def whole(self, module: str) -> frozenset[str]:
        """Return a module, all below it, and where its façade's names come from; for a lost one its nearest package."""
        while module and module not in self.files:
            module = module.rpartition(".")[0]
        below = {name for name in self.files if module and f"{name}.".startswith(f"{module}.")}
        return frozenset(below | {source for name in below for source, _ in self.stubs.get(name, {}).values()})

    def references(self, module: str) -> "_References":
        """Return what the file of a module refers to."""
        if module not in self._references:
            tree = ast.parse(self.files[module].read_text(encoding="utf-8"))
            self._references[module] = references = _References(self, module)
            references.read(tree)  # known before it is read: modules may import each other inside functions
            for node in ast.walk(tree):  # a façade's own code reaches its names through `sys.modules[__name__]`
                if isinstance(node, ast.Attribute) and node.attr in self.stubs.get(module, {}):
                    references.needs |= self.find(module, node.attr).needs
        return self._references[module]

    def _closure(self, modules: Iterable[str]) -> set[str]:
        found: set[str] = set()
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if module in self.files and module not in found:
                found.add(module)
                waiting += [*self.references(module).needs, module.rpartition(".")[0]]  # a package's code runs first
        return found

    def _with_data(self, modules: set[str]) -> set[Path]:
        code = {self.files[module] for module in modules}
        packages = {path.parent for path in code if path.stem == "__init__"}
        return code | {file for package in packages for file in _data(package)}


class _References:
    """The modules that code refers to, `needs`, and the names that it binds to modules, `modules`."""

    def __init__(self, library: Library, module: str) -> None:
        self._library, self.needs, self.modules = library, set[str](), dict[str, set[str]]()
        self._reads_texts = module != TYPES
        is_package = module in library.files and library.files[module].stem == "__init__"
        self._package = module if is_package else module.rpartition(".")[0]

    def read(self, tree: ast.Module) -> "_References":
        """Add what code refers to."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
        self._use(tree)
        return self

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top in PACKAGES:
                known = alias.name in self._library.files
                self.needs |= {alias.name} if known else self._library.whole(alias.name)
                self.modules.setdefault(alias.asname or top, set()).add(alias.name if alias.asname else top)

    def _import_from(self, node: ast.ImportFrom) -> None:
        parents = self._package.split(".")[: len(self._package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*parents, *([node.module] if node.module else [])])
        if module.partition(".")[0] not in PACKAGES:
            return
        for alias in node.names:
            if alias.name == "*":
                self.needs |= self._library.whole(module)
                continue
            found = self._library.find(module, alias.name)
            self.needs |= found.needs
            if found.module:
                self.modules.setdefault(alias.asname or alias.name, set()).add(found.module)

    def _use(self, node: ast.AST) -> None:
        """Walk over uses: an attribute of a bound module is looked up, a bare one counts as a whole."""
        names, base = _chain(node)
        if isinstance(base, ast.Name) and isinstance(base.ctx, ast.Load) and base.id in self.modules:
            for module in self.modules[base.id]:
                self._follow(module, names)
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and self._reads_texts:
            self.needs |= {node.value} & set(self._library.files)
        for child in ast.iter_child_nodes(node):
            self._use(child)

    def _follow(self, module: str | None, names: list[str]) -> None:
        for name in names:
            if module is None:
                return
            found = self._library.find(module, name)
            self.needs |= found.needs
            module = found.module
        if module is not None:
            self.needs |= self._library.whole(module)


def _chain(node: ast.AST) -> tuple[list[str], ast.AST]:
    """Split `a.b.c` into its attributes, first to last, and what they are attributes of."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return names, node


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node calls, reads or imports."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute) and node.attr != "eval":  # a module of torch has this method
        yield node.attr
    elif isinstance(node, ast.alias):
        yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""


def _name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _table(package: str, stub: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            module = ".".join([*([package] if node.level else []), *([node.module] if node.module else [])])
            for alias in node.names:
                yield alias.asname or alias.name, (module, alias.name)


def _data(package: Path) -> Iterator[Path]:
    """Yield a package's stub and its files that are no code; those of packages inside it are theirs."""
    for path in package.iterdir():
        if path.is_dir() and path.name != "__pycache__" and not (path / "__init__.py").exists():
            yield from _data(path)
        elif path.is_file() and path.suffix != ".py":
            yield path
