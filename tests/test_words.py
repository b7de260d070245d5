"""The library speaks the field's words: no public name, argument or docstring has one that STYLE's tables replace."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from dualpipe_lab._facade import public_names

ROOT = Path(__file__).parents[1]
FACADES = [
    ".".join(stub.relative_to(ROOT).parts[:-1]) for stub in sorted((ROOT / "dualpipe_lab").rglob("__init__.pyi"))
]
# parts of identifiers, between underscores or capitals
NAMES = {
    *("mailroom", "itinerary", "trunk", "fork", "twig", "savings", "negotiation", "survey", "remedy", "autopsy"),
    *("whereabouts", "books", "stamps", "seat", "judge", "warden", "cut", "whole", "own", "room", "turn", "eager"),
    *("gpu", "worker", "startup", "drain", "nb", "n", "whereabout", "twigs", "post"),
}
PROSE = re.compile(
    r"\b(mailroom|itinerar(?:y|ies)|trunks?|twigs?|savings|negotiat\w+|surveys?|autops\w+|whereabouts|stamps|seats?"
    r"|judges?|wardens?|dealt out|token_permutation|micro_batch(?:es)?|whole (?!numbers?\b)"
    r"|cut (?:into|along|among|over|layers?|products?|weights?|tensors?|linear)"
    r"|(?:my|its|their|this rank's|rank's) own (?:shard|part|rows?|chunk|slice|heads?|experts?))",
    re.IGNORECASE,
)


def public_objects():
    """Every public function and class by its dotted name, and every public method of a class."""
    found = {}
    for package in FACADES:
        module = importlib.import_module(package)
        for entry in public_names(package):
            value = getattr(module, entry.name)
            name = f"{package}.{entry.name}"
            if isinstance(value, ModuleType):
                continue
            found[name] = value
            if isinstance(value, type) and value.__module__.startswith("dualpipe_lab"):
                members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
                found |= {f"{name}.{key}": getattr(value, key, member) for key, member in members.items()}
    return found


def words_of(identifier):
    """`load_fullState` -> load, full, state."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def arguments_of(value):
    try:
        return [name for name in inspect.signature(value).parameters if not name.startswith("_")]
    except (TypeError, ValueError):
        return []


def wrong_words(name, value):
    """What is wrong with a public object: words of its name and arguments, phrases of its docstring."""
    identifiers = [name.rpartition(".")[2], *arguments_of(value)]
    wrong = [f"{identifier}: {word}" for identifier in identifiers for word in words_of(identifier) if word in NAMES]
    text = (getattr(value, "__doc__", None) or "") if callable(value) or isinstance(value, property) else ""
    return wrong + [match[0] for match in PROSE.finditer(" ".join(text.split()))]


@pytest.mark.parametrize("package", FACADES)
def test_public_names_and_docstrings_use_the_field_s_words(package):
    objects = {name: value for name, value in public_objects().items() if name.startswith(f"{package}.")}
    found = {name: wrong for name, value in objects.items() if (wrong := wrong_words(name, value))}
    assert found == {}


def test_a_private_word_is_found():
    def whole_weights(own, num_rows):
        """Return the weights, cut into shards; this rank's own part comes first."""

    assert wrong_words("lab.whole_weights", whole_weights) == [
        "whole_weights: whole",
        "own: own",
        "cut into",
        "this rank's own part",
    ]


if __name__ == "__main__":
    for name, value in public_objects().items():
        if wrong := wrong_words(name, value):
            print(name, wrong)
