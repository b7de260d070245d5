"""What the tests of tensor parallelism share: their oracle, parts of tensors, the modes of a layer."""

import json

import torch
from runs import ORACLES, kept, leaf

from dualpipe_lab.tp.grads import sum_partial_gradients
from dualpipe_lab.tp.shard import TensorParallel, full_state_dict

TOKENS = 12  # divides among 1, 2, 3 and 4 ranks


def oracle(name):
    """One block of `tp_blocks.json`."""
    return json.loads((ORACLES / "tp_blocks.json").read_text())[name]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def local(x, dim, tp, is_sharded=True):
    """This rank's part of a tensor along a dimension, or all of it."""
    if not is_sharded:
        return x
    start, stop = tp.span(x.shape[dim])
    return x.narrow(dim, start, stop - start)


def step(layer, x, dy, *arguments):
    """Output and all gradients of a layer on its rank, those of the weights in full."""
    x = leaf(x)
    y = layer(x, *arguments)
    y.backward(dy)
    sum_partial_gradients(layer)
    return {"y": y.detach(), "dx": x.grad} | full_state_dict(layer, layer.tp.group, "grad")


def attention_step(layer, x, dy, positions):
    """The same of an attention layer, which is given its tokens of x and dy."""
    x, dy = (local(value, 1, layer.tp, layer.tp.sequence_parallel) for value in (x, dy))
    return step(layer, x, dy, positions)


MODES = {
    "plain": {},
    "in turn": {"overlap": False},
    "sequence": {"sequence_parallel": True},
    "sequence, kept": {"sequence_parallel": True, "regather": False},
}


def modes():
    return {name: TensorParallel(**options) for name, options in MODES.items()}


def kept_bytes(forward, module):
    """Bytes of the distinct storages that autograd keeps for the backward, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved = kept(forward)  # alive until the end, so that no two share an address
    sizes = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in saved)}
    return sum(size for address, size in sizes.items() if address not in weights)
