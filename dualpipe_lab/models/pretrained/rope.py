"""The rotary angles of a config.json: their base, and how they are scaled.

Chapter: book/whole/weights.  In: the values of a config.json.  Out: base and scaling, and back.
Newer files have `rope_parameters` with both, older ones `rope_theta` and `rope_scaling`.
Elsewhere: transformers `ROPE_INIT_FUNCTIONS`.
"""

from collections.abc import Mapping
from typing import Any

from dualpipe_lab.models.pretrained.fields import NUMBER, OBJECT, TRUTH, Kind, PretrainedError, is_kind
from dualpipe_lab.tp.rope_scaling import RopeScaling, Scaling, YarnScaling

ROPE_KINDS: dict[str, Kind] = {**dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT), "rope_theta": NUMBER}
_LENGTH = "original_max_position_embeddings"
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_factor",
    "high_freq_factor": "high_factor",
    _LENGTH: "original_length",
}
_YARN = {"factor": "factor", _LENGTH: "original_length"}
_YARN_OPTIONS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
_KNOWN = {"rope_type", "type", "rope_theta", *_YARN, *_YARN_OPTIONS}


def rope_of(values: Mapping[str, Any], where: str) -> tuple[float, Scaling | None]:
    """Return base and scaling of the rotary angles.

    Args:
        values: of config.json.
        where: how messages name it.

    Raises:
        PretrainedError: another kind of scaling than Llama 3.1's and yarn, or numbers that it cannot have.
    """
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ("default", "llama3", "yarn"):
        raise PretrainedError(f"{where} scales its rotary angles by {kind!r}; known are 'default', 'llama3' and 'yarn'")
    base = _number(found.get("rope_theta") or values.get("rope_theta") or 10_000.0, "rope_theta", kind, where)
    if kind == "default":
        return float(base), None
    found = dict(found)
    if values.get(_LENGTH) is not None:
        found[_LENGTH] = values[_LENGTH]  # one outside of the object counts more
    names = _LLAMA3 if kind == "llama3" else _YARN
    numbers: dict[str, Any] = {ours: _number(found.get(theirs), theirs, kind, where) for theirs, ours in names.items()}
    options = _options(found, where) if kind == "yarn" else {}
    try:
        return float(base), (RopeScaling if kind == "llama3" else YarnScaling)(**numbers, **options)
    except ValueError as error:
        raise PretrainedError(f"{where}: {error}") from error


def rope_values(base: float, scaling: Scaling | None) -> dict[str, Any]:
    """Return the values of config.json for base and scaling."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if isinstance(scaling, RopeScaling):
        found |= {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for theirs, ours in _LLAMA3.items()}
    if isinstance(scaling, YarnScaling):
        found |= {"rope_type": "yarn"} | {theirs: getattr(scaling, ours) for theirs, ours in _YARN.items()}
        options = {name: getattr(scaling, name) for name in _YARN_OPTIONS}
        found |= {name: value for name, value in options.items() if value not in (None, 0.0) or name == "truncate"}
    longest = {}
    if isinstance(scaling, YarnScaling):  # transformers compares the two, and warns
        longest = {"max_position_embeddings": round(scaling.factor * scaling.original_length)}
    return {"rope_theta": base, "rope_parameters": found} | longest


def _options(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what yarn may have; what is not given, or is 0, has yarn's own value."""
    if unknown := sorted(set(found) - _KNOWN):
        raise PretrainedError(f"{where} scales its rotary angles by 'yarn' with {unknown[0]}, which is not known here")
    truncate = found.get("truncate", True)
    if not is_kind(truncate, TRUTH[0]):
        raise PretrainedError(f"{where}: rotary angles of kind 'yarn' need truncate as true or false, got {truncate!r}")
    given = {name: found[name] for name in _YARN_OPTIONS[:-1] if found.get(name) not in (None, 0)}
    if found.get("attention_factor") == 0:
        raise PretrainedError(f"{where}: yarn with attention_factor=0 hides all positions; leave it out")
    return {name: _number(value, name, "yarn", where) for name, value in given.items()} | {"truncate": truncate}


def _number(value: Any, name: str, kind: str, where: str) -> float:
    if not is_kind(value, (int, float)):
        raise PretrainedError(f"{where}: rotary angles of kind {kind!r} need {name} as a number, got {value!r}")
    number: float = value
    return number
