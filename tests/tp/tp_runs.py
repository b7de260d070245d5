"""What the tests of tensor parallelism share: their oracle, parts of tensors, the modes of a layer."""

import json

import torch
from runs import ORACLES, leaf

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


def attention_step(layer, x, dy, positions):
    """Output and all gradients of an attention layer on its rank: of the full weights, of its tokens of x and y."""
    tp = layer.tp
    x = leaf(local(x, 1, tp, tp.sequence_parallel))
    y = layer(x, positions)
    y.backward(local(dy, 1, tp, tp.sequence_parallel))
    sum_partial_gradients(layer)
    return {"y": y.detach(), "dx": x.grad} | full_state_dict(layer, tp.group, "grad")


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
    kept = {}

    def pack(saved):
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = saved, storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        output = forward()
    del output
    return sum(size for _, size in kept.values())
