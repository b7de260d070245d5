"""A cluster as JSON: every field by its own name, in FLOP/s, bytes, bytes/s and seconds; each one checked when read.

In: a cluster's fields.  Out: a file that a person can read and edit; read again, it gives an equal cluster.
A number that no accelerator has is refused with what it probably meant: memory below 1 MiB is gigabytes that were
written as bytes, a peak below 1 MFLOP/s is TFLOP/s, a latency above 1 s is microseconds.
Elsewhere: calculon's `systems/*.json`, in TFLOP/s, GiB and GB/s; SimuMax's system files.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe_lab.plan.efficiency import Efficiency, is_number
from dualpipe_lab.plan.hardware import Accelerator, LinkClass

ABOUT = "a cluster for dualpipe_lab.plan.Cluster.from_file, in FLOP/s, bytes, bytes/s and seconds"
_MOST_DIGITS = 30  # many more than any number here needs
_CLUSTER = ("accelerator", "num_ranks", "ranks_per_node", "inside", "between")


class _Range(NamedTuple):
    """What a number can be: its unit, least and most, and a factor that turns what people write into the unit."""

    unit: str
    least: float
    most: float
    factor: float
    written: str


_RATE = "bytes/s", 1e4, 1e14, 1e9, "GB/s"
_SECONDS = "seconds", 0.0, 1.0, 1e-6, "microseconds"
_RANGES = {
    "peaks": _Range("FLOP/s", 1e6, 1e17, 1e12, "TFLOP/s"),
    "memory_bytes": _Range("bytes", 2**20, 1e15, 1e9, "GB"),
    "memory_bandwidth": _Range(*_RATE),
    "bandwidth": _Range(*_RATE),
    "latency": _Range(*_SECONDS),
    "overhead": _Range(*_SECONDS),
}


def write_cluster(path: str | Path, cluster: Any) -> None:
    """Write a cluster's fields to a file; OSError where it cannot be written."""
    text = json.dumps({"about": ABOUT} | asdict(cluster), indent=2, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_cluster(path: str | Path) -> dict[str, Any]:
    """Return the fields of the cluster in a file, its parts made.

    Raises:
        ValueError: not JSON, a field that is unknown, missing, of another type or beyond what there is.
        OSError: no such file.
    """
    values = _values(path)
    values.pop("about", None)
    _check_names(f"{path}: a cluster", values, _CLUSTER, _CLUSTER)
    parts = {"accelerator": Accelerator, "inside": LinkClass, "between": LinkClass}
    made = {name: _part(f"{path}: {name}", values[name], kind) for name, kind in parts.items()}
    return values | made


def _values(path: str | Path) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once, parse_int=_whole)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8; write a cluster with Cluster.to_file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON, {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _mapping(f"{path}: a cluster", values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; json itself keeps the last of two equal names without a word."""
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the field {twice} stands twice in one object; keep one")
    return dict(pairs)


def _whole(digits: str) -> int:
    """Return a whole number of JSON, whose digits have no limit there."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has at most {_MOST_DIGITS} digits, got {len(digits)}; write it such as 8e10")
    return int(digits)


def _mapping(what: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} is an object of fields in braces, got {values!r}")
    return dict(values)


def _check_names(what: str, values: Mapping[str, Any], known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{what} has no field {name!r}, the nearest is {near}; it has {', '.join(known)}")
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{what} needs the field{'s' * (len(missing) > 1)} {', '.join(missing)}, got none")


def _part(what: str, given: Any, kind: type[Any]) -> Any:
    """Return an accelerator, a link or an efficiency of its fields."""
    values = _mapping(what, given)
    known = {field.name: field for field in fields(kind)}
    needed = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    _check_names(what, values, tuple(known), tuple(needed))
    made = {name: _value(f"{what}.{name}", name, value) for name, value in values.items()}
    try:
        return kind(**made)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _value(what: str, name: str, value: Any) -> Any:
    """Return a checked value of a field, by the field's name."""
    if name in ("efficiency", "memory_efficiency"):
        return _part(what, value, Efficiency)
    if name == "efficiencies":
        return {key: _part(f"{what}.{key}", one, Efficiency) for key, one in _mapping(what, value).items()}
    if name == "peaks":
        return {key: _number(f"{what}.{key}", name, one) for key, one in _mapping(what, value).items()}
    if name in _RANGES:
        return _number(what, name, value)
    if name in ("name", "source", "date") and not isinstance(value, str):
        raise ValueError(f"{what} is a text in quotes, got {value!r}")
    if name == "date" and not re.fullmatch(r"|\d{4}(-(0[1-9]|1[0-2]))?", value):
        raise ValueError(f"{what} is a year and month, got {value!r}; such as 2026-05, or leave it out")
    if name == "points" and not isinstance(value, list):
        raise ValueError(f"{what} is a list of [size, part of the peak], got {value!r}")
    return value


def _number(what: str, name: str, value: Any) -> float:
    unit, least, most, factor, written = _RANGES[name]
    if not is_number(value) or not -inf < value < inf:
        raise ValueError(f"{what} is a number of {unit}, got {value!r}")
    if value < 0 or (value == 0 and least > 0):
        raise ValueError(f"{what} is a number of {unit} {'above' if least else 'from'} 0, got {value!r}")
    if value < least or (factor < 1 and value > most):
        raise ValueError(
            f"{what} is {value:g} {unit}, {'less' if value < least else 'more'} than there is; if these are {written}, "
            f"write {value * factor:g}"
        )
    if value > most:
        raise ValueError(
            f"{what} is {value:g} {unit}, and one rank has at most {most:g}; write that of one rank, in {unit}, and "
            "multiply once"
        )
    if name == "memory_bytes" and value != int(value):
        raise ValueError(f"{what} is a whole number of bytes, got {value!r}; use {int(value)}")
    return int(value) if name == "memory_bytes" else value
