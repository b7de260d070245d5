"""Right answers of another style to the exercises on row-parallel layers."""

RIGHT = {
    "row_parallel-4": {
        "a reduce-scatter and an all-gather": """
import torch

from mine import column
from mine.ring import all_gather, padded, reduce_scatter


class SumFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, ranks):
        flat = padded(part.detach(), len(ranks))
        if len(ranks) > 1:
            flat = all_gather(reduce_scatter(flat, ranks), ranks)
        return flat[: part.numel()].reshape(part.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


def row_linear(x, weight, ranks):
    partial = column.linear(x, weight)
    return SumFromRanks.apply(partial, ranks)
""",
        "a star, as a function behind one Function": """
import torch
from dualpipe_lab import comm
from mine.column import linear


def summed(part, ranks):
    part = part.detach().contiguous().clone()
    root, me = ranks[-1], comm.get_rank()
    if me == root:
        for other in ranks[:-1]:
            more = torch.empty_like(part)
            comm.recv(more, other)
            part.add_(more)
        for work in [comm.isend(part, other) for other in ranks[:-1]]:
            work.wait()
    else:
        comm.send(part, root)
        comm.recv(part, root)
    return part


class SumFromRanks(torch.autograd.Function):
    forward = staticmethod(lambda ctx, part, ranks: summed(part, ranks))
    backward = staticmethod(lambda ctx, grad: (grad.view_as(grad), None))


row_linear = lambda x, weight, ranks: SumFromRanks.apply(linear(x, weight), ranks)
""",
    },
    "row_parallel-3": {
        "written out": """
def project(x, weight, bias):
    y = reduce_from_ranks(x @ weight.T)
    return torch.add(y, bias)
""",
        "the bias expanded": [
            ("functional.linear(x, weight)) + bias", "functional.linear(x, weight)) + bias.expand(*x.shape[:-1], -1)")
        ],
    },
}
