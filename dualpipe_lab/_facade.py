"""Façades: a package hands out the public names of its part, each imported when it is first asked for.

In: the stub `__init__.pyi` beside the package's `__init__.py`: one `from .file import name as name` per public name,
in teaching order, under comments that are headings.  Out: attributes, `dir`, `__all__`, a table of contents for `help`.
The stub is the one table of a part.  Type checkers read it too, so they know every name and refuse all others.
Elsewhere: lazy loading after scientific Python's SPEC 1; there a function disappears behind a submodule of the same
name as soon as that submodule is imported, here it stays.
"""

import ast
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from dualpipe_lab._optional import MissingExtra

WIDTH = 26  # columns of the names in the table of contents


class PublicName(NamedTuple):
    """One line of a stub: a name, the module that it comes from, and the heading above it."""

    name: str
    module: str
    heading: str

    def load(self, package: str) -> Any:
        """Import the name: an attribute of its module, or a module of the package itself."""
        if self.module == package:
            return import_module(f"{package}.{self.name}")
        return getattr(__import__(self.module, fromlist=[self.name]), self.name)


def public_names(package: str) -> list[PublicName]:
    """Return the names of a façade in teaching order; ValueError for a stub with anything but imports."""
    stub = str(sys.modules[package].__file__).rpartition(".")[0] + ".pyi"
    with open(stub, encoding="utf-8") as file:  # pathlib would take as long to import as the rest of this module
        text = file.read()
    headings = {number: line[2:] for number, line in enumerate(text.splitlines(), 1) if line.startswith("# ")}
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            heading = next((headings[line] for line in range(node.lineno, 0, -1) if line in headings), "")
            module = ".".join([*([package] if node.level else []), *([node.module] if node.module else [])])
            found += [PublicName(alias.name, module, heading) for alias in node.names]
        elif not isinstance(node, ast.AnnAssign | ast.Expr):
            raise ValueError(f"{stub}, line {node.lineno}: a façade's stub holds `from .file import name as name` only")
    return found


def first_sentence(value: Any) -> str:
    """Return the first paragraph of a docstring as one line; nothing for a constant."""
    has_own_text = isinstance(value, type | ModuleType) or callable(value)
    text = (getattr(value, "__doc__", None) or "") if has_own_text else ""
    return " ".join(text.strip().split("\n\n")[0].split())


class Facade(ModuleType):
    """The module type of a façade: names come from the stub, and stay when a submodule of the same name is imported."""

    _public: dict[str, PublicName]
    _header: str
    _moved: dict[str, str]

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """The header of `__init__.py`, then every public name with its first sentence, in teaching order."""
        lines, heading = [self._header.rstrip()], ""
        for entry in self._public.values():
            if entry.heading != heading:
                heading = entry.heading
                lines += ["", heading]
            lines.append(f"  {entry.name:<{WIDTH}}{self._sentence(entry.name)}".rstrip())
        return "\n".join(lines) + "\n"

    def _sentence(self, name: str) -> str:
        try:
            return first_sentence(getattr(self, name))
        except MissingExtra as missing:
            return f"({missing})"

    def __getattr__(self, name: str) -> Any:
        if name in self._moved:
            raise ImportError(f"{self.__name__}.{name} has moved: {self._moved[name]}")
        if name.startswith("_") or name not in self._public:
            known = "" if name.startswith("_") else f"; it has {', '.join(self._public)}"
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{known}")
        value = self.__dict__[name] = self._public[name].load(self.__name__)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        entry = self.__dict__.get("_public", {}).get(name)
        if entry is not None and isinstance(value, ModuleType) and entry.module != self.__name__:
            return  # the import system binds a submodule on its package, where a function of that name stands
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._public})

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)


def make_facade(package: str, moved: dict[str, str] | None = None) -> None:
    """Turn a package that is being imported into a façade over its stub.

    `moved`: names of earlier versions, each with the sentence that an import of it gets.
    """
    module = sys.modules[package]
    names = {entry.name: entry for entry in public_names(package)}
    module.__dict__.update(_public=names, _moved=moved or {}, _header=module.__doc__ or "", __all__=list(names))
    for name, entry in names.items():
        if entry.module != package and isinstance(module.__dict__.get(name), ModuleType):
            del module.__dict__[name]
    module.__class__ = Facade
