"""Checks of a config.json's fields, which all families share.

Chapter: book/whole/weights.  In: the values of a config.json.  Out: nothing, or a refusal that names field and value.
  kinds     a field that is there has the kind that it must have, and a size is there
  neutral   a field that would change what the model computes has a value under which nothing changes
Elsewhere: transformers checks fields in each configuration class.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias


class PretrainedError(ValueError):
    """A folder of published weights that cannot be used: which file or tensor, and why."""


Kind: TypeAlias = tuple[type | tuple[type, ...], str]
Kinds: TypeAlias = Mapping[str, Kind]
Neutral: TypeAlias = Mapping[str, tuple[Any, ...]]

WHOLE: Kind = (int, "a whole number")
NUMBER: Kind = ((int, float), "a number")
OBJECT: Kind = (Mapping, "an object of names and values")
TRUTH: Kind = (bool, "true or false")

# what another value would change in the result, in every family
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu", "swish", None),
    "attention_dropout": (0, None),
}


def check_kinds(values: Mapping[str, Any], where: str, kinds: Kinds, needed: Iterable[str]) -> None:
    """Refuse a field of another kind, or a needed one that is missing; PretrainedError names it."""
    for name, (kind, words) in kinds.items():
        value = values.get(name)
        is_missing = value is None and name in needed
        if is_missing or (value is not None and not is_kind(value, kind)):
            raise PretrainedError(f"{where} needs {name} as {words}, got {value!r}")


def is_kind(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Return whether a value of a JSON file is of a kind; true and false are no numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def check_neutral(values: Mapping[str, Any], where: str, neutral: Neutral) -> None:
    """Refuse a field that would make another model; PretrainedError names it."""
    for name, allowed in neutral.items():
        if values.get(name) not in allowed:
            raise PretrainedError(
                f"{where} has {name}={values[name]!r}, which this model does not compute; it would be another model"
            )


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        PretrainedError: there is no file, or it holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PretrainedError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise PretrainedError(f"{file} holds no object of names and values")
    return found
