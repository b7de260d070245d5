"""Which cases of a long test run: a few, drawn with a fixed seed, or all of them with --every (`make test EVERY=1`).

    @pytest.mark.drawn(3)                           three cases of this test
    @pytest.mark.drawn(1, per="name")               one case for each value of its parameter `name`
    pytestmark = pytest.mark.drawn(40, by="page")   the cases of 40 pages, the same pages in all tests of the file
    def test(..., amount): range(amount(20, 8))     twenty with --every, else eight
    def test(..., some): launch(some(CASES, 3))     three of the cases that one launch runs

A case is drawn by the name of its test, so a case added elsewhere changes nothing.
"""

import random
from collections import defaultdict


def drawn(items):
    """The items that run: those without the mark, and of each marked test as many as it says, in their order.

    Args:
        items: what pytest has collected.
    """
    groups = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            groups[_group(item, mark.kwargs)].append((item, mark))
    chosen = set()
    for name, group in groups.items():
        (number,), by = group[0][1].args, group[0][1].kwargs.get("by")
        kinds = list(dict.fromkeys(_kind(item, by) for item, _ in group))
        some = set(random.Random(name).sample(kinds, min(number, len(kinds))))
        chosen.update(item for item, _ in group if _kind(item, by) in some)
    return [item for item in items if item in chosen or not item.get_closest_marker("drawn")]


def some(cases, number):
    """So many of a list or of a table, in their order."""
    chosen = set(random.Random(len(cases)).sample(range(len(cases)), min(number, len(cases))))
    if isinstance(cases, dict):
        return {name: case for place, (name, case) in enumerate(cases.items()) if place in chosen}
    return [case for place, case in enumerate(cases) if place in chosen]


def _group(item, options):
    """The name of what is drawn from: a test, one value in a test, or a whole file."""
    if "by" in options:
        return item.path.name
    value = f" {item.callspec.params[options['per']]}" if "per" in options else ""
    return f"{item.path.name}::{item.originalname}{value}"


def _kind(item, by):
    """What is drawn: the case itself, or a value that several cases share."""
    return str(item.callspec.params[by]) if by else item.name
