"""A function on a rank computes under the caller's global modes of torch."""

import subprocess
import sys
from contextlib import ExitStack

import torch

import dualpipe_lab as lab
from dualpipe_lab.launch import modes

REST = modes._read()


def computed(rank, world_size):
    """What the modes decide: numbers, types, graphs, refusals and text."""
    x = torch.tensor([1e8, 1.0, -1e8])
    weight = torch.ones(2, 2, requires_grad=True)
    found = [x.dtype, x.device, None if x.is_meta else float(x.sum()), torch.nn.Linear(2, 2).weight.dtype]
    y = weight @ torch.ones(2, 2)
    found += [y.requires_grad, y.is_inference(), y.dtype]
    found += [modes._read(), "" if x.is_meta else str(torch.tensor([1 / 3]))]
    torch.set_default_dtype(torch.float16)  # the rank's own matter: what it returns is packed without it
    torch.set_grad_enabled(False)
    return found


def alone():
    with modes.under(modes.modes_of_caller()):  # which takes back what the function has set
        return computed(0, 1)


CALLERS = {
    "at rest": lambda stack: None,
    "no_grad, autocast": lambda stack: (
        stack.enter_context(torch.no_grad()),
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, cache_enabled=False)),
    ),
    "inference": lambda stack: stack.enter_context(torch.inference_mode()),
    "device": lambda stack: stack.enter_context(torch.device("meta")),
    "others": lambda stack: (
        torch.set_default_dtype(torch.float64),
        torch.set_printoptions(precision=9),
        torch.use_deterministic_algorithms(True, warn_only=True),
        torch.set_float32_matmul_precision("high"),
    ),
    "at rest again": lambda stack: None,
}


def test_a_rank_computes_under_the_modes_of_its_caller():
    for name, enter in CALLERS.items():
        with ExitStack() as stack:
            stack.callback(modes._write, REST)
            enter(stack)
            expected, found = alone(), lab.launch(computed, 2, timeout=60)
        assert list(found) == [expected, expected], name
    assert modes._read() == REST


def test_a_caller_without_torch_imports_none():
    code = "import sys; from dualpipe_lab.launch import modes; print(modes.modes_of_caller(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None False\n"
