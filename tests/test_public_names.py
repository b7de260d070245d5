"""What a façade hands out can be used with it alone: types of arguments, functions in docstrings, names that left."""

import ast
import functools
import importlib
import inspect
import re
import typing
from collections import defaultdict
from pathlib import Path

from test_facades import FACADES, ROOT

from dualpipe_lab._facade import public_names

BEFORE = Path(__file__).parent / "names_of_0_2_0.txt"  # package and name, one a line, from that version's stubs


def public():
    """Every public value by its name, `dp.Zero1`."""
    found = {}
    for package in FACADES:
        module = importlib.import_module(package)
        part = package.partition(".")[2] or "lab"
        found |= {f"{part}.{entry.name}": getattr(module, entry.name) for entry in public_names(package)}
    return found


def functions(value):
    """A function, or what a class lets a caller call."""
    if inspect.isfunction(value) or isinstance(value, functools.partial):
        yield inspect.unwrap(value)
    elif inspect.isclass(value):
        for name, member in vars(value).items():
            member = getattr(member, "fget", getattr(member, "__func__", getattr(member, "func", member)))
            if inspect.isfunction(member) and (not name.startswith("_") or name in ("__init__", "__call__")):
                yield inspect.unwrap(member)


def library_types(function, annotation):
    """The library's classes in an annotation."""
    if isinstance(annotation, str):
        words = [function.__globals__.get(word) for word in re.findall(r"\w+", annotation)]
        return {word for word in words if inspect.isclass(word) and word.__module__.startswith("dualpipe_lab")}
    inner = [annotation, *typing.get_args(annotation)]
    inner += [part for one in inner if isinstance(one, list | tuple) for part in one]
    below = (library_types(function, part) for part in inner[1:])
    own = {annotation} if inspect.isclass(annotation) and annotation.__module__.startswith("dualpipe_lab") else set()
    return own.union(*below)


def test_a_caller_can_get_at_the_type_of_every_argument_of_a_public_function():
    """Public, a base of what is public, a protocol, a tuple, or returned by something public: else nobody calls it."""
    values = public()
    waiting, known = [value for value in values.values() if callable(value)], set()
    while waiting:
        value = waiting.pop()
        if inspect.isclass(value):
            if value in known:
                continue
            known.update(value.__mro__)
        for function in functions(value):
            waiting += library_types(function, function.__annotations__.get("return")) - known
    missing = defaultdict(set)
    for name, function in (
        (name, inspect.unwrap(value)) for name, value in values.items() if inspect.isfunction(value)
    ):
        for argument, annotation in function.__annotations__.items():
            for one in library_types(function, annotation) - known if argument != "return" else ():
                if not (getattr(one, "_is_protocol", False) or issubclass(one, tuple)):  # a tuple will do
                    missing[f"{one.__module__}.{one.__name__}"].add(f"{name}({argument})")
    assert not missing, dict(missing)


def test_docstrings_name_no_function_of_the_library_that_no_facade_hands_out():
    values = public()
    doors = [
        importlib.import_module(f"dualpipe_lab.{name}") for name in ("comm", "data", "pp.schedules", "pp.closed_forms")
    ]
    known = {name.rpartition(".")[2] for name in values} | {name for door in doors for name in vars(door)}
    texts = {}
    for name, value in values.items():
        if callable(value):
            texts[name] = value.__doc__ or ""
            known |= set(vars(value)) | set(getattr(value, "__annotations__", {})) if inspect.isclass(value) else set()
            for function in functions(value):
                texts[f"{name}:{function.__name__}"] = function.__doc__ or ""
                known |= set(inspect.signature(function).parameters)
    ours = {
        node.name
        for file in (ROOT / "dualpipe_lab").rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    wrong = {
        name: found
        for name, text in texts.items()
        if (found := set(re.findall(r"`(?:\w+\.)*(\w+)(?:\(\))?`", text)) & ours - known)
    }
    assert wrong == {}


def test_the_changelog_says_what_became_of_every_name_that_left():
    stored = set(BEFORE.read_text().split())
    left = stored - set(public())
    text = (ROOT / "CHANGELOG.md").read_text()
    table = text.partition("### Renamed")[2].partition("\n### ")[0]
    rows = [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    told = [name for row in rows for name in row]
    assert sorted(left - set(told)) == []
    assert sorted(set(told) & set(public())) == [], "these are still handed out"
    assert len(told) == len(set(told))
