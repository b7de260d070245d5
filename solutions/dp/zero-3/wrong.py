"""Typical wrong answers and lazy cheats of the exercises on ZeRO-3."""

from bad_answer import Bad

THREE, PART = "zero_3-3", "zero_3-5"

TYPICAL = {
    PART: {
        "the name is freed, the weight is not": Bad(
            [
                (
                    "return fn(x, _whole(shard, shape, ranks))  #",
                    "w = _whole(shard, shape, ranks)\n        ctx.backward_of = lambda: w\n        return fn(x, w)  #",
                )
            ],
            "The whole weight may not be kept",
        ),
        "not summed": Bad(
            [
                (
                    "return dx, reduce_scatter(padded(dweight, len(ranks)), ranks), None",
                    "return dx, shard_of(dweight, ranks).detach(), None",
                )
            ],
            "it is that of this rank's own rows",
        ),
        "the shard is a view": Bad([("row[me].clone()", "row[me]")], "a view of the weight keeps all of it"),
    },
    THREE: {
        "the starter": Bad(
            [("register_full_backward_pre_hook", "register_full_backward_hook")], "the gradients of unit 2 are NaN"
        ),
        "never freed": Bad([("module.register_forward_hook(lambda *_: unit.free())", "pass")], "whole at once"),
    },
}

CHEATS = {
    PART: {
        "the shard is the whole weight": Bad(
            """
import torch
from mine.ring import all_reduce


def shard_of(weight, ranks):
    return weight.detach().clone().requires_grad_()


class Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, fn, shape, ranks):
        ctx.save_for_backward(x, shard)
        ctx.rest = fn, ranks
        return fn(x, shard)

    @staticmethod
    def backward(ctx, dy):
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            dx, dweight = torch.autograd.grad(ctx.rest[0](x, weight), (x, weight), dy)
        all_reduce(dweight, ctx.rest[1])
        return dx, dweight, None, None, None
""",
            "shard 0 has shape",
        ),
        "autograd keeps it": Bad(
            """
import torch
from math import prod
from dualpipe_lab.comm import get_rank
from mine.ring import all_gather, padded, reduce_scatter


def shard_of(weight, ranks):
    parts = padded(weight.detach(), len(ranks)).view(len(ranks), -1)
    return parts[ranks.index(get_rank())].clone().requires_grad_()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, ranks):
        ctx.ranks = ranks
        return all_gather(shard, ranks)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.ranks), None


class Unit:
    @staticmethod
    def apply(x, shard, fn, shape, ranks):
        return fn(x, Gather.apply(shard, ranks)[: prod(shape)].view(shape))
""",
            "The whole weight may not be kept",
        ),
    },
    THREE: {
        "nothing": Bad("def connect(module, unit):\n    pass", "are NaN"),
    },
}
