"""A notebook with the numbers of a seed: in its text, in the calls of its checks, in its metadata."""

import re
from collections.abc import Sequence
from typing import Any

from dualpipe_course import record, registry
from dualpipe_course.variants import Variants

_END = re.compile(r",?\s*\)\s*\Z")  # of a call


def with_seed(call: str, seed: int) -> str:
    """Return a check's call with a seed; exercise.js writes the same.

    >>> with_seed("check.interleaved.numbers((makespan, peak))", 4711)
    'check.interleaved.numbers((makespan, peak), seed=4711)'
    """
    return _END.sub(f", seed={seed})", call)


def seed_of(notebook: Any) -> int | None:
    """The seed in a notebook's metadata, if there is one that makes sense."""
    try:
        seed = notebook["metadata"]["dualpipe_lab"]["seed"]
    except (KeyError, TypeError):
        return None
    return seed if type(seed) is int and 0 < seed <= record.MAX_SEED else None


def variants_of(tags: Sequence[str]) -> Variants | None:
    """The variants of the exercise whose check has these tags."""
    name = next((tag.removeprefix("check-") for tag in tags if tag.startswith("check-")), "")
    check = registry.find(name)
    return check.variants if check else None


def personal(notebook: Any, seed: int) -> None:
    """Give a notebook of exercises the numbers of a seed: its text, its checks and its metadata."""
    texts = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    for cell in notebook["cells"]:
        if variants := variants_of(cell["metadata"].get("tags", ())):
            cell["source"] = with_seed("".join(cell["source"]), seed)
            for text in texts:
                text["source"] = variants.text("".join(text["source"]), seed)
            notebook["metadata"].setdefault("dualpipe_lab", {})["seed"] = seed
