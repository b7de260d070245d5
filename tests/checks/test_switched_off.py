"""What an answer cannot call while it is judged."""

import multiprocessing

import pytest
import torch

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
