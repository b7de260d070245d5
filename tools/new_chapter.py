"""Make a chapter and its exercises as a skeleton that passes: a page, a check, a solution, wrong and right answers.

Usage: new_chapter.py PART NAME         for example: new_chapter.py tp expert-tensor-parallel
It writes the files below, lists both pages in _toc.yml and book/addresses.txt and the topic in
dualpipe_course/check.py; `make pairs` and `make exercises` do the rest.  What exists is never written over.
  book/PART/NAME.md                        the chapter, to be filled
  dualpipe_course/PART/TOPIC.py            one exercise to predict, one to write for ranks, with their hints
  solutions/PART/NAME/NAME.md              the page with its solution
  solutions/PART/NAME/wrong.py, right.py   what its check must refuse and accept
"""

import re
import sys
from pathlib import Path

PARTS = ("start", "dp", "tp", "pp", "cp", "ep")
HEADER = """---
jupytext:
  formats: md:myst,ipynb
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---
"""
CHAPTER = """
# {title}

What the reader can do so far. What goes wrong now, with one number of a real model. The idea in one sentence. What it
costs. Four to six plain sentences, without symbols and without words that no page before has explained.

**The claim of the page in one sentence, with at most two numbers.**

You need [ranks and messages](../start/ranks-and-messages.md). Core 2 minutes; going deeper 1 more.

```{{code-cell}} ipython3
:tags: [hide-input]

from dualpipe_lab.viz import Arrow, Box, Diagram

boxes = [Box(f"rank {{rank}}", (10 * rank, 0), (6, 2)) for rank in range(2)]
Diagram("What travels", boxes, [Arrow("rank 0", "rank 1", "x")])
```

*Say in one sentence what to look at first.*

```{{code-cell}} ipython3
:tags: [hide-input]

import dualpipe_lab as lab  # first: starts a server meanwhile

from dualpipe_lab import comm
```

## The smallest case by hand

A question to answer before running. How many ranks are there, and what do they return?

:::{{admonition}} Answer
:class: dropdown
Two, and each returns its number.
:::

```{{code-cell}} ipython3
print(lab.launch(lambda rank, world_size: rank, 2))
```

:::{{admonition}} Takeaway
:class: note
One or two lines that a reader would repeat to a colleague.
:::

[Exercises](../../exercises/{part}/{name}.md).

## How it breaks

One defect that was planted, and the symptom that shows it.

## Recap

- You can now do this.
- Formula: it has units.
- Cost: time, memory, bytes.
- Choose it from this size on, with a number of real hardware.
- Do not choose it there.

## Going deeper

Closed forms over grids, predicted beside counted, edge cases, neighbours.
"""
SOLUTION = """
# Exercises: {title}

Two exercises for [{title}](../../../book/{part}/{name}.md), 15 minutes in all.
Complete each marked cell, then run the check below it.
`check.{topic}.hint()` gives a hint, and another one each time you ask; `check.progress()` shows what is solved.

```{{code-cell}} ipython3
from torch import Tensor

from dualpipe_course import check
from dualpipe_lab import comm
```

## 1. A number

*Predict, 5 minutes.* Two ranks send one message each.
How many messages travel?

```{{code-cell}} ipython3
:tags: [answer-{topic}-1]

### BEGIN SOLUTION
messages = 2
### STUB
# messages = ...  # your number
### END SOLUTION
```

```{{code-cell}} ipython3
:tags: [check-{topic}-1]

check.{topic}.messages(messages)
```

## 2. A total

*Implement, 10 minutes.* Every rank has a tensor of its own.
**Write `total(x)`, which returns the sum over all ranks and leaves `x` as it is.**

```{{code-cell}} ipython3
:tags: [answer-{topic}-2]

def total(x: Tensor) -> Tensor:
    \"\"\"Return the sum of x over all ranks.\"\"\"
    ### BEGIN SOLUTION
    y = x.clone()
    comm.all_reduce(y)
    return y
    ### END SOLUTION
```

```{{code-cell}} ipython3
:tags: [check-{topic}-2]

check.{topic}.total(total)
```
"""
CHECK = '''"""Exercises of "{title}": a number, a total.

Chapter: book/{part}/{name}.  Totals are compared with one process, bytes with one all-reduce.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.comparison import Found, Limit, Numbers, Unchanged, compare_on_ranks
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.trial import needs_function, needs_ints

EXPECTED, SIZE = 2, 3


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("{topic}"), exercise)


@exercise(
    "{topic}-1",
    "A number",
    "predict",
    minutes=5,
    points=1,
    hints=("How many ranks send?", "Each of them sends once."),
)
def messages(answer: object) -> str:
    """Predict how many messages travel."""
    (found,) = needs_ints(answer, ("messages",))
    if found != EXPECTED:
        raise Wrong(f"{{found}} messages: two ranks send one each")
    return "2 messages"


@exercise(
    "{topic}-2",
    "A total",
    "implement",
    minutes=10,
    points=2,
    hints=("Which collective leaves the sum on every rank?", "comm.all_reduce writes into its tensor: give it a copy."),
)
def total(fn: Callable[..., Any]) -> str:
    """Write `total(x)`: the sum over all ranks, for one all-reduce."""
    needs_function(fn)
    for num_ranks in (1, 2, 3):
        needed = 2 * (num_ranks - 1) * 8 * SIZE
        words = "the ranks sent {{found}} bytes in all, one sum sends {{most}}"
        limits = [Limit("bytes", needed, words, needed)]
        compare_on_ranks(_total, num_ranks, fn, case=f"{{num_ranks}} rank(s)", limits=limits)
    return "the sum of one process on 1 to 3 ranks, for one all-reduce"


def _total(rank: int, world_size: int, fn: Callable[..., Any]) -> Found:
    import torch

    parts = 1 + torch.arange(world_size * SIZE, dtype=torch.float64).view(world_size, SIZE)
    x = parts[rank].clone()
    unchanged = Unchanged(x=x)
    y = fn(x)
    unchanged.check()
    return Found({{"the total": Numbers.of(y)}}, {{"the total": Numbers.of(parts.sum(0))}})
'''
WRONG = '''"""Typical wrong answers and lazy cheats of the exercises on {title}."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {{
    "{topic}-1": {{"one rank": Bad("messages = 1", "two ranks"), "both ways": Bad("messages = 4", "two ranks")}},
    "{topic}-2": {{
        "a mean": Bad([("all_reduce(y)", 'all_reduce(y, "avg")')], "one over the number of ranks"),
        "into x": Bad([("x.clone()", "x")], "the argument x has changed"),
    }},
}}
CHEATS = {{
    "{topic}-1": {{"equal to all": Bad(EQUAL_TO_ALL + "messages = Anything()", "whole number")}},
    "{topic}-2": {{"objects": Bad("def total(x):\\n    return sum(comm.all_gather_object(x))", "one sum sends")}},
}}
'''
RIGHT = '''"""Right answers of another style to the exercises on {title}."""

RIGHT = {{  # two for each exercise that is no prediction
    "{topic}-2": {{
        "new memory": "def total(x):\\n    y = x + 0\\n    comm.all_reduce(y)\\n    return y",
        "in two halves": (
            "def total(x):\\n    parts = [x[:1].clone(), x[1:].clone()]\\n    for part in parts:\\n"
            "        comm.all_reduce(part)\\n    return __import__('torch').cat(parts)"
        ),
    }},
}}
'''


class Refused(ValueError):  # noqa: N818
    """A chapter that cannot be made."""


def files_of(part: str, name: str) -> dict[Path, str]:
    """Return the text of every new file.

    >>> [path.as_posix() for path in files_of("tp", "my-topic")][1:3]
    ['dualpipe_course/tp/my_topic.py', 'solutions/tp/my-topic/my-topic.md']
    """
    topic = name.replace("-", "_")
    words = {"part": part, "name": name, "topic": topic, "title": name.replace("-", " ").capitalize()}
    solution = Path("solutions", part, name)
    return {
        Path("book", part, f"{name}.md"): HEADER + CHAPTER.format(**words),
        Path("dualpipe_course", part, f"{topic}.py"): CHECK.format(**words),
        solution / f"{name}.md": HEADER + SOLUTION.format(**words),
        solution / "wrong.py": WRONG.format(**words),
        solution / "right.py": RIGHT.format(**words),
    }


def listed(text: str, after: str, line: str, where: str) -> str:
    """Return a file's text with a line after the last line that matches `after`; Refused if none does."""
    matches = list(re.finditer(rf"^{after}.*\n", text, re.MULTILINE))
    if not matches:
        raise Refused(f"{where} has no line that begins with {after!r}; the part's first chapter is listed by hand")
    end = matches[-1].end()
    return text[:end] + line + text[end:]


def make(part: str, name: str) -> list[Path]:
    """Write the skeleton below the current folder; return what was written.

    Raises:
        Refused: an unknown part, a name that is no lower-case word, or a file that exists.
    """
    if part not in PARTS:
        raise Refused(f"a part is one of {', '.join(PARTS)}, got {part!r}")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise Refused(f"a name is words in lower case with dashes, such as my-topic, got {name!r}")
    files, topic = files_of(part, name), name.replace("-", "_")
    there = [str(path) for path in files if path.exists()]
    if there:
        raise Refused(f"{', '.join(there)} exists already; choose another name")
    toc, table, addresses = Path("_toc.yml"), Path("dualpipe_course/check.py"), Path("book/addresses.txt")
    contents = toc.read_text(encoding="utf-8")
    lines = f"      - file: book/{part}/{name}.md\n        sections:\n          - file: exercises/{part}/{name}.md\n"
    contents = listed(contents, f"          - file: exercises/{part}/", lines, "_toc.yml")
    line = f'    "{topic}": "{part}.{topic}",\n'
    topics = listed(table.read_text(encoding="utf-8"), rf'    "\w+": "{part}\.', line, str(table))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    known = {*addresses.read_text(encoding="utf-8").split(), f"book/{part}/{name}", f"exercises/{part}/{name}"}
    toc.write_text(contents, encoding="utf-8")
    table.write_text(topics, encoding="utf-8")
    addresses.write_text("\n".join(sorted(known)) + "\n", encoding="utf-8")
    return [*files, toc, table, addresses]


def main(arguments: list[str]) -> int:
    """Make one chapter."""
    try:
        part, name = arguments
        print("\n".join(f"wrote {path}" for path in make(part, name)))
    except ValueError as error:
        known = isinstance(error, Refused)
        print(error if known else "usage: new_chapter.py PART NAME, such as tp my-topic", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
