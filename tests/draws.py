"""Which cases of a long test run: a few, drawn with a fixed seed, or all of them with --every (`make test EVERY=1`).

    @pytest.mark.drawn(3)                           three cases of this test
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
            groups[f"{item.path.name}::{item.originalname}", mark.args[0]].append(item)
    left = {item for item in items if not item.get_closest_marker("drawn")}
    for (name, number), group in groups.items():
        left.update(random.Random(name).sample(group, min(number, len(group))))
    return [item for item in items if item in left]


def some(cases, number):
    """So many of a list or of a table, in their order."""
    chosen = set(random.Random(len(cases)).sample(range(len(cases)), min(number, len(cases))))
    if isinstance(cases, dict):
        return {name: case for place, (name, case) in enumerate(cases.items()) if place in chosen}
    return [case for place, case in enumerate(cases) if place in chosen]
