"""`same_as_one_process`: one sentence where ranks and one process agree, name and usual cause where they do not."""

import re

import pytest
import torch
from torch.nn.functional import linear

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.one_process import cause, wholes

WHOLE = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def layer(rank, world_size, mistake):
    """A column-parallel layer: shards of y and dW, the whole dx."""
    torch.manual_seed(3)
    weight, x, dy = (torch.randn(*shape, dtype=torch.float64) for shape in ((12, 8), (5, 8), (5, 12)))
    weight = weight.chunk(world_size)[rank].clone().requires_grad_()
    x.requires_grad_()
    y = linear(x, weight)
    y.backward(dy.chunk(world_size, 1)[rank])
    if not mistake:
        comm.all_reduce(x.grad)
    return {"y": y, "grads": [x.grad, weight.grad], "rank 0 alone": 1.5 if rank == 0 else None}


def test_shards_whole_values_and_values_of_some_ranks_are_compared(capsys):
    lab.same_as_one_process(layer, False, ranks=(2, 3))
    told = capsys.readouterr().out
    assert told.startswith("equal to one process on 2 and 3 ranks: 4 values, largest difference ")


def test_a_difference_has_its_name_and_its_cause():
    with pytest.raises(
        AssertionError, match=r"on 2 ranks grads\[0\] differs .* on rank 0, .*\n.*: an all-reduce is missing"
    ):
        lab.same_as_one_process(layer, True, ranks=2)


def test_a_reference_of_its_own_is_called_here():
    with pytest.raises(AssertionError, match=r"on 2 ranks the result differs .*\n.* 2 times as large"):
        lab.same_as_one_process(lambda rank, n: WHOLE, ranks=[2], reference=lambda: WHOLE / 2)
    with pytest.raises(AssertionError, match="on 1 ranks a is missing"):
        lab.same_as_one_process(lambda rank, n: {}, ranks=[1], reference=lambda: {"a": WHOLE})
    with pytest.raises(AssertionError, match="b is not among the values of one process"):
        lab.same_as_one_process(lambda rank, n: {"a": 1, "b": 2}, ranks=[1], reference=lambda: {"a": 1})
    with pytest.raises(AssertionError, match=r"float32, and torch\.float64"):
        lab.same_as_one_process(lambda rank, n: WHOLE.float(), ranks=[1], reference=lambda: WHOLE)


@pytest.mark.parametrize(("reference", "options", "error", "words"), [
    (lambda: None, {}, ValueError, "nothing to compare"),
    (lambda: {"a": "text"}, {}, TypeError, "a is a str"),
    (lambda: WHOLE, {"ranks": ()}, ValueError, "at least one number of ranks"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_a_launch(reference, options, error, words):
    with pytest.raises(error, match=words):
        lab.same_as_one_process(lambda rank, n: 1 / 0, reference=reference, **options)


def test_tiny_numbers_are_compared_by_their_own_size():
    tiny = 1e-13 * WHOLE
    with pytest.raises(AssertionError, match="2 times as large"):
        lab.same_as_one_process(lambda rank, n: 2 * tiny, ranks=1, reference=lambda: tiny)


def swapped(values):
    return torch.cat([values[2:], values[:2]])


def one_off(values):
    found = values.clone()
    found[3, 2:] += 1
    return found


MISTAKES = [  # what each of 4 ranks has, the words
    ([WHOLE / 4 + shift for shift in (-1, 1, 2, -2)], "their sum is right: an all-reduce is missing"),
    ([WHOLE + shift for shift in (-1, 1, 2, -2)], "an average over them is missing"),
    ([WHOLE / 3, WHOLE / 3, WHOLE * 2 / 3, WHOLE * 2 / 3], "2 groups of ranks have a sum each"),
    ([WHOLE, WHOLE / 2, WHOLE / 4, WHOLE / 8], "right on rank 0 alone"),
    ([4 * WHOLE] * 4, "4 times as large, the number of ranks"),
    ([WHOLE / 4] * 4, "0.25 times as large, one over the number of ranks"),
    ([16 * WHOLE] * 4, "the square of the number of ranks"),
    ([2 * WHOLE] * 4, "2 times as large: it was added twice"),
    ([-WHOLE] * 4, "the sign is wrong"),
    ([3 * WHOLE] * 4, "3 times as large"),
    ([0 * WHOLE] * 4, "it is zero"),
    ([WHOLE / 0] * 4, "not finite"),
    ([swapped(WHOLE)] * 4, "in another order"),
    ([WHOLE.float().double()] * 4, "something inside is float32"),
    ([one_off(WHOLE)] * 4, r"4 of 24 numbers are off, the first at \[3, 2\]"),
    ([WHOLE.exp()] * 4, "no multiple"),
    ([WHOLE * (1 + 1e-15)] * 4, "that is what torch.float64 rounds"),
]  # fmt: skip


@pytest.mark.parametrize(("by_rank", "words"), MISTAKES, ids=[words[:20] for _, words in MISTAKES])
def test_usual_mistakes_have_their_words(by_rank, words):
    found = next((one for one in by_rank if not torch.equal(one, WHOLE)), by_rank[0])
    assert re.search(words, cause(dict(enumerate(by_rank)), found, WHOLE, 4))


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_unequal_size_are_joined_in_the_order_of_the_ranks(dim):
    shards = dict(enumerate(WHOLE.split([1, 3, WHOLE.shape[dim] - 4], dim)))
    ((ranks, joined),) = wholes(shards, WHOLE, "it")
    assert ranks == "ranks 0, 1, 2"
    assert torch.equal(joined, WHOLE)


def test_zeros_behind_the_last_shard_are_padding():
    flat = torch.cat([WHOLE.flatten()[:23], torch.zeros(1, dtype=torch.float64)])
    ((_, joined),) = wholes(dict(enumerate(flat.chunk(3))), WHOLE.flatten()[:23], "it")
    assert torch.equal(joined, WHOLE.flatten()[:23])
    with pytest.raises(AssertionError, match="gather what is sharded otherwise"):
        wholes(dict(enumerate(WHOLE.flatten().chunk(3))), WHOLE.flatten()[:23], "it")


def test_what_is_no_shard_is_refused_with_all_shapes():
    with pytest.raises(
        AssertionError, match=r"\(4, 3\) on rank 0, \(2, 6\) on rank 1.*gather what is sharded otherwise"
    ):
        wholes({0: WHOLE[:, :3], 1: WHOLE[:2]}, WHOLE, "it")
