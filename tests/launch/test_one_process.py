"""`same_as_one_process`: one sentence where ranks and one process agree, name and usual cause where they do not."""

import re

import pytest
import torch
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.launch.one_process import _compared, wholes
from dualpipe_lab.topology import Topology

WHOLE = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def in_lines(words):
    """A pattern that finds words wherever their lines are broken."""
    return "(?s)" + words.replace(" ", r"\s+")


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
        AssertionError, match=in_lines(r"on 2 ranks grads\[0\] differs .* on rank 0, .*: an all-reduce is missing")
    ):
        lab.same_as_one_process(layer, True, ranks=2)


def test_a_reference_of_its_own_is_called_here():
    with pytest.raises(AssertionError, match=in_lines(r"on 2 ranks the result differs .* 2 times as large")):
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


def bucket(rank, world_size, mistake):
    """Gradients of two layers in one flat bucket, of a sum over all rows, with one mistake."""
    torch.manual_seed(3)
    weights = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    x = torch.randn(2, 12, 4, dtype=torch.float64)[: 2 if mistake == "before the last microbatch" else 1]
    flat = torch.zeros(24, dtype=torch.float64)
    pair = Mesh(Topology([("dp", world_size // 2), ("tp", 2)])).group("tp") if mistake == "wrong group" else None
    early = {"before the last gradient": (0, 0), "before the last microbatch": (0, 1), "no sum": None}
    sent_at = early.get(mistake, (len(x) - 1, 1))
    for number, batch in enumerate(x):
        rows = batch.chunk(world_size)[rank]
        grads = torch.autograd.grad(sum((rows @ w.t()).square().sum() for w in weights), weights)
        for place, grad in enumerate(grads):
            flat[12 * place : 12 * place + 12] += grad.flatten()
            if (number, place) == sent_at:
                comm.all_reduce(flat, "avg" if mistake == "mean" else "sum", group=pair)
    if mistake == "summed twice":
        comm.all_reduce(flat)
    return flat / {"divided twice": world_size, "sign": -1, "float32": 3}.get(mistake, 1)


def torch_ddp(rank, world_size, mistake):
    """Gradients of torch's DDP, which averages over the ranks; the loss is to be the mean over all rows."""
    torch.manual_seed(3)
    layer = torch.nn.Linear(4, 3, bias=False).double()
    x = torch.randn(12, 4, dtype=torch.float64).chunk(world_size)[rank]
    model = layer if mistake == "without DDP" else DistributedDataParallel(layer)
    (model(x).square().sum() / (12 if mistake == "loss over all rows" else len(x))).backward()
    return layer.weight.grad


RUNS = [  # function, mistake, numbers of ranks, the words
    (bucket, "no sum", (2, 4), "the ranks have partial sums, and their sum is right: an all-reduce is missing"),
    (bucket, "summed twice", (2,), "2 times as large, the number of ranks: it was summed .*, or added twice"),
    (bucket, "summed twice", (4,), "4 times as large, the number of ranks: it was summed over the ranks once too"),
    (bucket, "divided twice", (2,), "0.5 times as large, one over the number of ranks: .* divided twice, .* halved"),
    (bucket, "divided twice", (4,), "0.25 times as large, one over the number of ranks: .* divided twice, or is a"),
    (bucket, "mean", (2, 4), "one over the number of ranks: .* is a mean or a part where a sum"),
    (bucket, "wrong group", (4,), "2 groups of ranks have a value each, .* summed over the wrong group, or not at all"),
    (bucket, "sign", (2, 4), "-1 times as large: it was given the wrong sign"),
    (bucket, "before the last gradient", (2, 4), "numbers 12 to 23 are each rank's own, .* bucket was sent before"),
    (bucket, "before the last microbatch", (2, 4), "the ranks differ; neither .* summed, something was added"),
    (torch_ddp, "without DDP", (2, 4), "the mean over the ranks is right: an average over them is missing"),
    (torch_ddp, "loss over all rows", (2, 4), "one over the number of ranks: it was divided twice"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "mistake", "ranks", "words"), RUNS, ids=[f"{run[1]} {run[2]}" for run in RUNS])
def test_a_mistake_in_a_run_has_its_words(fn, mistake, ranks, words):
    def found(rank, world_size):
        return fn(rank, world_size, mistake)

    for num_ranks in ranks:
        with pytest.raises(AssertionError, match=in_lines(rf"on {num_ranks} ranks .*{words}")):
            lab.same_as_one_process(found, ranks=num_ranks, reference=lambda: right(fn, mistake))


def right(fn, mistake):
    """Return what one process has: the same rows, and nothing to sum."""
    return lab.launch(fn, 1, mistake if mistake == "before the last microbatch" else "none")[0]


def one_off(values):
    found = values.clone()
    found[3, 2:] += 1
    return found


FLAT = WHOLE.flatten()
GATHERED = [  # what each of 4 ranks has, the words
    ([2 * WHOLE] * 4, "2 times as large: it was added twice, or summed over 2 of the 4 ranks once too .* group$"),
    ([WHOLE / 2] * 4, "0.5 times as large: it was halved, .* parts, or not summed over 2 of the 4 ranks, .* group$"),
    ([16 * WHOLE] * 4, "the square of the number of ranks"),
    ([WHOLE, 2 * WHOLE, 2 * WHOLE, WHOLE], "2 times as large, and right on rank 0, 3$"),
    ([WHOLE, 0 * WHOLE, 2 * WHOLE, WHOLE], "right on rank 0, 3 alone"),
    ([2 * WHOLE, 0 * WHOLE, 2 * WHOLE, 0 * WHOLE], "2 groups of ranks have a value each"),
    ([0 * WHOLE, WHOLE / 3, 0 * WHOLE, WHOLE * 2 / 3], "the ranks have partial sums"),
    ([0 * WHOLE] * 4, "it is zero: not written"),
    ([torch.cat([FLAT[:5], 0 * FLAT[5:9], FLAT[9:]]).view(4, 6)] * 4, "numbers 5 to 8 are zero"),
    ([WHOLE / 0] * 4, "not finite"),
    ([WHOLE[[0, 3, 2, 1]]] * 4, "that of rank 3 for 1, 1 for 3$"),
    ([WHOLE[[0, 1, 1, 3]]] * 4, "each shard is right, and some are another rank's: that of rank 1 for 2$"),
    ([WHOLE[[0, 3, 2, 1]] * (1 + 1e-14)] * 4, "that of rank 3 for 1, 1 for 3$"),
    ([WHOLE.float().double()] * 4, "something inside may be float32: the error has that size"),
    ([WHOLE * (1 + 1e-15)] * 4, "that is what its dtype rounds: pass a larger tolerance"),
]  # fmt: skip
NO_CAUSE = [  # numbers from which nothing follows, and what is said of them
    ([WHOLE + shift for shift in (1, 2, 4, 8)], "the ranks differ; neither sum"),
    ([WHOLE * factor for factor in (2, 4, 8, 16)], "the ranks differ; neither sum"),
    ([WHOLE * 2.5] * 4, "it is 2.5 times as large$"),
    ([WHOLE.exp()] * 4, "the numbers do not say why"),
    ([FLAT[torch.arange(23, -1, -1)].view(4, 6)] * 4, "its numbers are right and in another order"),
    ([WHOLE + 1e-10] * 4, "off by .*e-11 of its largest number: more than rounds, no float32"),
    ([one_off(WHOLE)] * 4, r"4 of 24 numbers are off, the first at \[3, 2\], and the others are right"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("by_rank", "words"), GATHERED + NO_CAUSE, ids=[words[:30] for _, words in GATHERED + NO_CAUSE]
)
def test_numbers_have_the_words_of_the_first_row_that_fits(by_rank, words):
    assert re.search(words, said(by_rank, WHOLE))


def said(by_rank, expected):
    """Return the line with the cause, as `same_as_one_process` prints it."""
    with pytest.raises(AssertionError) as raised:
        _compared("it", dict(enumerate(by_rank)), expected, len(by_rank), 0.0, 0.0)
    return " ".join(str(raised.value).partition(":\n")[2].split())


def test_few_numbers_are_no_evidence():
    """One number may be any multiple, equal shards have no owner, and one small number is no rounding."""
    assert "times" not in said([torch.tensor(6.0)] * 4, torch.tensor(3.0))
    assert "4 times as large, the number of ranks" in said([torch.tensor(12.0)] * 4, torch.tensor(3.0))
    equal = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0])
    assert said([equal.flip(0).roll(2)] * 4, equal) == "its numbers are right and in another order"
    small = torch.tensor([1.0, 1e-6, 3.0], dtype=torch.float64)
    assert "numbers 1 to 1 are zero" in said([small * torch.tensor([1, 0, 1])] * 4, small)
    assert "float32" not in said([WHOLE.float() * (1 + 4e-6)] * 4, WHOLE.float())


def test_a_rank_with_another_ranks_shard():
    shards = dict(enumerate(WHOLE.chunk(2)[::-1]))
    with pytest.raises(AssertionError, match=in_lines(r"that of rank 1 for 0, 0 for 1$")):
        _compared("it", shards, WHOLE, 2, 1e-12, 1.0)


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


def test_a_mask_of_infinities_and_low_precision_have_no_false_cause():
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 3.0]], dtype=torch.float64)
    assert said([2 * mask] * 2, mask) == "1 of 4 numbers are off, the first at [1, 1], and the others are right"
    assert "right on rank" not in said([mask.flip(0)] * 2, mask)
    low = WHOLE.bfloat16()
    assert "rounds" in said([low * (1 + 2**-7)] * 4, low)
    for wrong in (low * 1.1, torch.where(low.abs() < 0.2, 0, low), torch.where(low.abs() < 0.2, -low, low)):
        assert "rounds" not in said([wrong] * 4, low)


def test_integers_are_compared_exactly_and_nan_proves_nothing():
    big = torch.tensor([2**60, 5])

    def off_by_one(rank, world_size):
        return {"seed": big + (world_size > 1)}

    with pytest.raises(AssertionError, match="seed differs from one process by 1 on rank 0, allowed is 0"):
        lab.same_as_one_process(off_by_one, ranks=2)
    with pytest.raises(ValueError, match="loss has NaN in one process, and what equals it proves nothing"):
        lab.same_as_one_process(lambda rank, world_size: {"loss": float("nan")}, ranks=2)
