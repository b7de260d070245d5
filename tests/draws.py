"""Which cases of a long test run: a few, drawn with a fixed seed, or all of them with --every (`make test EVERY=1`).

    @pytest.mark.drawn(3)                     three cases of this test
    pytestmark = pytest.mark.drawn(40, by="page")   in a file: the cases of 40 of its pages, the same in all of its tests
    def test(..., amount): range(amount(20, 8))     twenty with --every, else eight

A case is drawn by the name of its test, so a case added elsewhere changes nothing.
"""

import random
from collections import defaultdict


def drawn(items):
    """The items that run: those without the mark, and of each marked test as many as it says, in their order.

    Args:
        items: what pytest has collected.
    """
    chosen = set()
    for (name, by, number), group in _groups(items).items():
        kinds = list(dict.fromkeys(_kind(item, by) for item in group))
        some = set(random.Random(name).sample(kinds, min(number, len(kinds))))
        chosen.update(item for item in group if _kind(item, by) in some)
    return [item for item in items if item in chosen or _mark(item) is None]


def _mark(item):
    return item.get_closest_marker("drawn")


def _kind(item, by):
    """What is drawn: the case itself, or the value of one parameter that several cases share."""
    return str(item.callspec.params[by]) if by else item.name


def _groups(items):
    groups = defaultdict(list)
    for item in items:
        if mark := _mark(item):
            (number,), by = mark.args, mark.kwargs.get("by")
            name = item.path.name if by else f"{item.path.name}::{item.originalname}"
            groups[name, by, number].append(item)
    return groups
