"""What an answer cannot call while it is judged."""

import multiprocessing

import pytest
import torch

from dualpipe_lab.checks.switched_off import Without
from dualpipe_lab.tp.operators import CopyToRanks


def apply_directly():
    CopyToRanks.apply(torch.ones(1), None)


def refused(queue):
    """Run in a process of its own: nothing is switched on again."""
    try:
        Without(apply_directly, "dualpipe_lab.tp.operators")()
    except RuntimeError as error:
        queue.put(str(error))
    else:
        queue.put("it ran")


def test_an_autograd_function_is_switched_off_with_its_module():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=refused, args=(queue,))
    process.start()
    assert queue.get(timeout=60).startswith("the exercise is to write this yourself")
    process.join()


def test_names_that_do_not_exist_are_errors():
    with pytest.raises((AttributeError, ImportError)):
        Without(apply_directly, "dualpipe_lab.tp.nothing")()
