"""The conjugate operators: what they do forwards and backwards, on any dimension, to tensors of any layout."""

import pytest
import torch
from runs import RANKS, assert_refused, draw, launch, leaf

from dualpipe_lab.tp import mappings as operators
from dualpipe_lab.tp.mappings import (
    gather_from_ranks,
    gather_tokens,
    reduce_scatter_tokens,
    slice_to_ranks,
)

ON_A_DIMENSION = (gather_from_ranks, slice_to_ranks, gather_tokens, reduce_scatter_tokens)


def same(values, dim):
    return values


def total(values, dim):
    return [sum(values)] * len(values)


def joined(values, dim):
    return [torch.cat(values, dim)] * len(values)


def parts(values, dim):
    return [value.chunk(len(values), dim)[rank] for rank, value in enumerate(values)]


def parts_of_total(values, dim):
    return sum(values).chunk(len(values), dim)


TABLE = {
    "copy_to_ranks": (same, total),
    "reduce_from_ranks": (total, same),
    "gather_from_ranks": (joined, parts),
    "slice_to_ranks": (parts, joined),
    "gather_tokens": (joined, parts_of_total),
    "reduce_scatter_tokens": (parts_of_total, joined),
}


def whole_numbers(seed, *shape):
    return torch.round(draw(seed, *shape) * 8)  # whose sums are exact in any order


def apply(name, dim):
    operator = getattr(operators, name)
    return (lambda x: operator(x, dim=dim)) if operator in ON_A_DIMENSION else operator


def turned(x):
    """The same numbers, the last dimension first in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def run(rank, name, shape, dim, layout):
    """Input, output, the gradient that comes and the one that leaves; the tensors that came are not changed."""
    x = leaf(layout(whole_numbers(rank, *shape)))
    y = apply(name, dim)(x)
    dy = layout(whole_numbers(50 + rank, *y.shape))
    before = x.detach().clone(), dy.clone()
    y.backward(dy)
    assert torch.equal(x.detach(), before[0])
    assert torch.equal(dy, before[1])
    return x.detach(), y.detach(), dy, x.grad


@pytest.mark.parametrize("world_size", RANKS)
def test_forward_and_backward_are_those_of_the_table(world_size):
    shape = (12, 2, 24)

    def fn(rank, world_size):
        names = ("copy_to_ranks", "reduce_from_ranks")
        cases = [(name, 0) for name in names]
        cases += [(operator.__name__, dim) for operator in ON_A_DIMENSION for dim in (0, 2, -1, -3)]
        layouts = {"turned": turned, "as it is": torch.clone}
        return {
            (name, dim, how): run(rank, name, shape, dim, layout)
            for name, dim in cases
            for how, layout in layouts.items()
        }

    ranks = launch(fn, world_size)
    for key in ranks[0]:
        name, dim, _ = key
        xs, ys, dys, dxs = zip(*(found[key] for found in ranks), strict=True)
        forward, backward = TABLE[name]
        assert all(map(torch.equal, forward(xs, dim), ys)), key
        assert all(map(torch.equal, backward(dys, dim), dxs)), key


def test_a_dimension_that_does_not_divide_is_refused():
    calls = [apply(name, 0) for name in ("slice_to_ranks", "reduce_scatter_tokens")]
    message = "divides among the ranks, got 5 on 3 ranks; pad it to 6"
    assert_refused(3, [(lambda call=call: call(torch.ones(5, 2)), message) for call in calls])
