"""What the text of each part may not do, read without running it: every way round is refused with its line."""

import pytest

from dualpipe_course.own.finder import official
from dualpipe_course.own.part import Part
from dualpipe_course.own.parts import PARTS, before
from dualpipe_course.own.rules import check_text
from dualpipe_course.registry import all_checks
from dualpipe_course.wrong import Wrong

DECLARED = {check.part: check for check in all_checks() if isinstance(check, Part)}
ORDER = list(PARTS)
EVERYWHERE = {
    "torch.distributed": ("torch.distributed is off in every part", ["import torch.distributed as dist"]),
    "a module of torch": ("torch.distributed is off in every part", ["from torch import distributed"]),
    "a name of torch.distributed": ("torch.distributed is off in every part", ["from torch.distributed import *"]),
    "an attribute": ("torch.distributed is off in every part", ["import torch", "x = torch.distributed.get_rank"]),
    "nn.parallel": ("torch.nn.parallel is off in every part", ["import torch", "x = torch.nn.parallel"]),
    "another name for torch": (
        "torch.distributed is off in every part",
        ["import torch", "T = torch", "x = T.distributed"],
    ),
    "getattr": ("torch.distributed is off in every part", ["import torch", "x = getattr(torch, 'distributed').send"]),
    "importlib": ("importlib is off in every part", ["import importlib"]),
    "__import__": ("__import__ is off in every part", ["x = __import__('numpy')"]),
    "exec": ("exec is off in every part", ["exec('x = 1')"]),
    "a collective": ("comm.all_reduce is the library's", ["from dualpipe_lab import comm", "x = comm.all_reduce"]),
    "a collective by name": ("comm.all_gather is the library's", ["from dualpipe_lab.comm import all_gather"]),
    "the library": ("dualpipe_lab.pp is the library's", ["from dualpipe_lab import pp"]),
    "the course": ("dualpipe_course is the course's own", ["from dualpipe_course import check"]),
    "numpy": ("numpy is none of what a part imports", ["import numpy"]),
    "numpy's linalg": ("numpy is none of what a part imports", ["from numpy.linalg import norm as length"]),
    "all of torch": ("a star hides what is used", ["from torch.nn.functional import *"]),
    "inside a function": ("imports stand at the top of the file", ["def inside():", "    import math"]),
    "inside a method": (
        "imports stand at the top of the file",
        ["class A:", "    def f(self):", "        import math"],
    ),
    "a line that is no Python": ("", ["def inside(:"]),
}


def refused(part, *lines, names=()):
    """The message for the official text with these lines below it, and the number of the last one."""
    off = DECLARED[part].off if part in DECLARED else ()
    text = official(part)
    with pytest.raises(Wrong) as error:
        check_text(part, "\n".join([text, *lines]), names, off)
    return error.value.message, len(text.split("\n")) + len(lines)


def test_at_least_one_part_is_declared_on_its_own_page():
    assert DECLARED
    for part, check in DECLARED.items():
        assert check.name.rpartition("-")[0] == PARTS[part], part


@pytest.mark.parametrize("part", ORDER)
def test_the_official_text_keeps_to_the_rules(part):
    check = DECLARED.get(part)
    check_text(part, official(part), check.names if check else (), check.off if check else ())


@pytest.mark.parametrize("part", ORDER)
def test_the_course_s_own_part_is_refused(part):
    message, line = refused(part, f"from dualpipe_ours.{part} import *")
    assert f"line {line}: dualpipe_ours is the course's own" in message


@pytest.mark.parametrize("part", ORDER)
def test_a_part_imports_earlier_parts_alone(part):
    for other in ORDER:
        if other in before(part):
            check_text(part, f"from mine.{other} import anything\nfrom .{other} import more\n", ())
            continue
        for line in (f"from mine.{other} import anything", f"import mine.{other} as it", f"from mine import {other}"):
            message, number = refused(part, line)
            assert message.startswith(f"line {number}: mine.{other} is not before {part}"), line


@pytest.mark.parametrize("what", EVERYWHERE)
def test_a_way_round_is_refused_in_every_part(what):
    says, lines = EVERYWHERE[what]
    for part in ORDER:
        message, line = refused(part, *lines)
        assert message.startswith(f"line {line}: "), (part, message)
        assert says in message, (part, message)


@pytest.mark.parametrize("part", [part for part, check in DECLARED.items() if check.off])
def test_what_is_off_in_a_part_is_refused(part):
    for off in DECLARED[part].off:
        says = f"{off} is off in {part}: it is what you write here"
        parent, _, name = off.rpartition(".")
        if not parent:
            ways = [[f"x = y{off}()"]]
        else:
            ways = [
                ["import torch", f"x = {off}"],
                [f"from {parent} import {name}"],
                [f"from {parent} import {name} as other"],
                [f"import {parent} as other", f"x = other.{name}"],
            ]
        for lines in ways:
            message, line = refused(part, *lines)
            assert message == f"line {line}: {says}", (lines, message)


@pytest.mark.parametrize("part", DECLARED)
def test_a_text_without_the_part_s_names_is_refused(part):
    names = DECLARED[part].names
    with pytest.raises(Wrong, match=f"does not define {', '.join(names)}"):
        check_text(part, '"""Nothing."""\n', names)


def test_what_a_part_may_do():
    """Other styles: a function of comm or the module, standard library, earlier parts by module, types alone,
    and what is asked of torch by a computed name, such as a type."""
    text = """
import math, os.path
from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from dualpipe_lab import comm
from dualpipe_lab.comm import isend as start
import mine.ring as ring
from mine import data

if TYPE_CHECKING:
    from mine.data import num_tokens
total = comm.get_world_size
y = F.silu
dtypes = [getattr(torch, name) for name in ("float32", "int64")]
"""
    check_text("buckets", text, ("total", "y"))
