"""What an answer cannot call while it is judged."""

import multiprocessing
import re
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name, walk_packages

import pytest
import torch

import dualpipe_course
from dualpipe_course.switched_off import Without
from dualpipe_lab.ep.deepseek_moe import update_biases
from dualpipe_lab.tp.mappings import CopyToRanks


def apply_directly():
    CopyToRanks.apply(torch.ones(1), None)


def call_decorated():
    update_biases(torch.nn.Linear(1, 1), 0.1)  # below torch.no_grad()


def refused(queue, fn, name):
    """Run in a process of its own: nothing is switched on again."""
    try:
        Without(fn, name)()
    except RuntimeError as error:
        queue.put(str(error))
    else:
        queue.put("it ran")


@pytest.mark.parametrize(
    ("fn", "name"),
    [(apply_directly, "dualpipe_lab.tp.mappings"), (call_decorated, "dualpipe_lab.ep.deepseek_moe")],
)
def test_functions_of_autograd_and_decorated_ones_are_switched_off_with_their_module(fn, name):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=refused, args=(queue, fn, name))
    process.start()
    assert queue.get(timeout=60).startswith("the exercise is to write this yourself")
    process.join()


def test_names_that_do_not_exist_are_errors():
    with pytest.raises((AttributeError, ImportError)):
        Without(apply_directly, "dualpipe_lab.tp.nothing")()


def named_modules():
    """What the sources of the checks name in full, and what their tuples of names hold."""
    for found in walk_packages(dualpipe_course.__path__, "dualpipe_course."):
        module = import_module(found.name)
        text = Path(module.__file__).read_text()
        yield from re.findall(r"[\"'](dualpipe_lab(?:\.\w+)+(?::\w+(?:\.\w+)*)?)[\"']", text)
        for value in vars(module).values():
            names = value if isinstance(value, tuple) else (value,)
            texts = (name for name in names if isinstance(name, str))
            yield from (text for text in texts if re.fullmatch(r"dualpipe_lab(\.\w+)+(:\w+(\.\w+)*)?", text))


def test_every_module_that_a_check_names_exists():
    names = set(named_modules())
    assert len(names) > 30
    for name in names:
        resolve_name(name)
