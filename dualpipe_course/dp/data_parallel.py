"""Exercises of "Data parallel": the part `data`, a library that averages.

Chapter: book/dp/data-parallel.  Gradients are judged against one process in float64, messages by the ledger.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import OnRanks, Part

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = Sequence[Sequence[tuple[int, int]]]  # by rank and microbatch: tokens, and how many of them count

IGNORE_INDEX = -100
VOCABULARY, WIDTH, ROW = 8, 6, 4  # of the repair's model, and the tokens of a row
OFF = tuple(f"dualpipe_lab.dp.{name}" for name in ("data_parallel", "buckets", "ddp", "zero1", "zero2", "zero3"))
_OWN_TOKENS = (
    "each rank has divided by its own tokens, so what a token weighs depends on its rank: "
    "1/n of all n tokens is right for every one"
)
_ONE_AVERAGE = (
    "the ranks sent {found:,} bytes in all, {most:,} are enough: average() sends the gradients, and you need one "
    "number beside them"
)


def _averaged(rank: int, world_size: int, fn: Callable[..., Any], counts: list[int]) -> Found:
    from torch import nn

    from dualpipe_lab import comm

    model, calls = _model(), []

    def average(module: nn.Module) -> None:
        calls.append(1)
        for parameter in module.parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, "average() needs a gradient on every rank"
                comm.all_reduce(parameter.grad, "avg")

    fn(model, *_valid_tokens(counts, rank), average)
    if len(calls) != 1:
        return Found({}, refused=f"called average() {len(calls)} times; it is to be called once")
    values = {name: Numbers.of(grad) for name, grad in _grads(model).items()}
    means = _grads(_backward_of_means(counts, [1 / (max(count, 1) * world_size) for count in counts]))
    slips = {name: {_OWN_TOKENS: Numbers.of(grad)} for name, grad in means.items()}
    frozen = "a frozen parameter has got a gradient; leave parameters out that do not require one"
    return Found(values, slips=slips if world_size > 1 else {}, changed="" if model[3].weight.grad is None else frozen)


def _averaged_alone(rank: int, world_size: int, counts: list[int]) -> "dict[str, Tensor | None]":
    return _grads(_backward_of_means(counts, [1 / sum(counts)] * world_size))


def _backward_of_means(counts: list[int], weights: list[float]) -> "nn.Sequential":
    """A model after one backward of all ranks' losses, each token of a rank with that rank's weight."""
    from torch.nn.functional import cross_entropy

    model = _model()
    for rank, weight in enumerate(weights):
        tokens, targets = _valid_tokens(counts, rank)
        logits = model(tokens).flatten(0, 1)
        loss = cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        (loss * weight).backward()
    return model


def _model() -> "nn.Sequential":
    """An embedding, a linear layer and a frozen scale, equal in every process."""
    import torch
    from torch import nn

    torch.manual_seed(11)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), head, nn.PReLU()).double()
    model[3].requires_grad_(False)
    return model


def _grads(model: "nn.Sequential") -> "dict[str, Tensor | None]":
    return {"the gradient of the table": model[0].weight.grad, "the gradient of the head": model[2].weight.grad}


def _valid_tokens(counts: list[int], rank: int) -> "tuple[Tensor, Tensor]":
    """A rank's tokens and targets, in rows of 4; as many targets as it has are valid, at least one row is there."""
    import torch

    generator = torch.Generator().manual_seed(100 * rank)
    shape = (max(-(-counts[rank] // ROW), 1), ROW)
    tokens, targets = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
    targets.view(-1)[counts[rank] :] = IGNORE_INDEX
    return tokens, targets


def _one_average(world_size: int, counts: list[int]) -> list[Limit]:
    gradients, beside = 2 * VOCABULARY * WIDTH * 8, 16  # bytes
    others = 2 * (world_size - 1)
    return [Limit("bytes", others * (gradients + beside), _ONE_AVERAGE, least=others * gradients)]


def _summed(rank: int, world_size: int, ranks: list[int], batch: Batch) -> Found:
    """All three functions on a group, each microbatch with a backward of its own."""
    import torch
    from mine.data import num_tokens, share_of_loss, sum_gradients

    if rank not in ranks:
        return Found({}, costs=dict.fromkeys(("count", "between", "gradients"), 0))
    own = _microbatches(batch, ranks.index(rank))
    weights, targets = _weights(), torch.cat([torch.empty(0, dtype=torch.int64), *(t for _, t in own)])
    meter = Meter()
    total = num_tokens(targets, ranks)
    count_bytes, share, found = meter.lap().bytes, torch.zeros((), dtype=torch.float64), []
    for tokens, goal in own:
        logits = _logits(weights, tokens, ranks.index(rank))
        loss = share_of_loss(logits, goal, total)
        loss.backward()
        share += loss.detach()
        found.append((logits.detach(), goal))
    between = meter.lap().bytes
    sum_gradients(list(weights.values()), ranks)
    values = {"the number of tokens": [float(total)], "the share of the loss": share}
    values |= {f"the gradient of {name}": weight.grad for name, weight in weights.items()}
    costs = {"count": count_bytes, "between": between, "gradients": meter.lap().bytes}
    slips = {
        "the number of tokens": _other_counts(targets, batch),
        "the share of the loss": _other_shares(found, total),
    }
    return Found({name: Numbers.of(value) for name, value in values.items()}, slips=slips, costs=costs)


def _other_counts(targets: "Tensor", batch: Batch) -> dict[str, Numbers | None]:
    return {
        "it is this rank's alone; all ranks divide by the same number": Numbers((1,), [float((targets >= 0).sum())]),
        "it counts targets of -100, too": Numbers((1,), [float(sum(num for own in batch for num, _ in own))]),
    }


def _other_shares(found: "list[tuple[Tensor, Tensor]]", total: float) -> dict[str, Numbers | None]:
    """What the usual mistakes make of the sum of a rank's shares."""
    from torch.nn.functional import cross_entropy

    means = [cross_entropy(logits, goal) for logits, goal in found]
    sums = [cross_entropy(logits, goal, reduction="sum") for logits, goal in found]
    of_its_own = "the mean over this rank's own tokens, so what a token weighs depends on its rank: divide by `total`"
    twice = "a mean over the microbatch's own tokens, divided by `total` once more: divide the sum"
    return {
        of_its_own: Numbers.of(sum(means)),
        twice: Numbers.of(sum(means) / max(float(total), 1.0)),
        "the sum, not yet divided by `total`": Numbers.of(sum(sums)),
    }


def _alone(rank: int, world_size: int, ranks: list[int], batch: Batch) -> "dict[str, Tensor | None]":
    """The mean over all tokens that count, and its gradients."""
    import torch
    from torch.nn.functional import cross_entropy

    weights = _weights()
    names = ("the number of tokens", "the share of the loss", *(f"the gradient of {name}" for name in weights))
    if rank not in ranks:
        return dict.fromkeys(names)
    sums = [torch.zeros((), dtype=torch.float64) for _ in ranks]
    for place in range(len(ranks)):
        for tokens, goal in _microbatches(batch, place):
            logits = _logits(weights, tokens, place)
            sums[place] = sums[place] + cross_entropy(logits[goal >= 0], goal[goal >= 0], reduction="sum")
    total = sum(valid for own in batch for _, valid in own)
    if total:
        (torch.stack(sums).sum() / total).backward()
    shares_of = [one.detach() / max(total, 1) for one in sums]
    grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights.values()]
    own = shares_of[ranks.index(rank)]
    return dict(zip(names, [torch.tensor([total], dtype=torch.float64), own, *grads], strict=True))


def _weights() -> "dict[str, Tensor]":
    """A table, a head, and a scale that the first, third, ... of a group use, equal in every process."""
    import torch

    generator = torch.Generator().manual_seed(5)
    shapes = {"the table": (7, 4), "the head": (7, 4), "the scale": (4,)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: weight.requires_grad_() for name, weight in drawn.items()}


def _logits(weights: "dict[str, Tensor]", tokens: "Tensor", place: int) -> "Tensor":
    table, head, scale = weights.values()
    x = table[tokens] if place % 2 else table[tokens] * scale
    return x.tanh() @ head.t()


def _microbatches(batch: Batch, place: int) -> "list[tuple[Tensor, Tensor]]":
    """Tokens and targets, in which those that count are spread."""
    import torch

    generator, found = torch.Generator().manual_seed(17 + place), []
    for num, valid in batch[place]:
        tokens, targets = (torch.randint(0, 7, (num,), generator=generator) for _ in range(2))
        targets[torch.randperm(num, generator=generator)[valid:]] = IGNORE_INDEX
        found.append((tokens, targets))
    return found


def _few_bytes(world_size: int, ranks: list[int], batch: Batch) -> list[Limit]:
    num = len(ranks)
    most = num * sum(2 * (num - 1) * -(-numel // num) * 8 for numel in (28, 28, 4))
    counted = "the ranks sent {found} bytes to count tokens, {most} are enough: one all-reduce of a number"
    summed = "the ranks sent {found} bytes of gradients, {most} are enough: one all-reduce of each"
    between = "rank {rank} sent {found} bytes in share_of_loss, which is given the total"
    return [
        Limit("count", num * 2 * (num - 1) * 8, counted),
        Limit("between", 0, between, scope="each"),
        Limit("gradients", most, summed),
    ]


def _why_not_summed(off: Off) -> str:
    if off.found is not None and any(value != value for value in off.found.flat):
        return f"{off.name} is not a number: 0 was divided by 0, or a mean was taken over no token"
    if off.name.startswith("the gradient") and off.found is None:
        return f"{off.name} is missing: this rank did not use the weight, and the sum of the others belongs there too"
    return in_words(off)


data = Part(
    "data_parallel-5",
    "data",
    "The mean over all ranks",
    "Write num_tokens, share_of_loss and sum_gradients: the mean over the tokens of all ranks, as a sum of shares.",
    names=("num_tokens", "share_of_loss", "sum_gradients"),
    trials=(
        OnRanks(
            _summed,
            (
                (1, [0], [[(3, 3)]]),
                (2, [0, 1], [[(2, 2)], [(2, 2)]]),
                (2, [0, 1], [[(4, 1)], [(3, 3)]]),
                (2, [1, 0], [[(4, 0)], [(5, 2), (3, 3)]]),
                (3, [0, 1, 2], [[(4, 3)], [], [(0, 0), (6, 5)]]),
                (4, [3, 1], [[(5, 4)], [(2, 1)]]),
                (2, [0, 1], [[(3, 0)], []]),
            ),
            _alone,
            "group {1} of {0} rank(s), microbatches (tokens, of which count) {2}",
            _few_bytes,
            _why_not_summed,
        ),
    ),
    right="7 batches on 1 to 3 ranks: unequal ranks, a rank without tokens, a batch without a target",
    minutes=35,
    points=4,
    hints=(
        "What does a single token weigh in the mean over all tokens? That must not depend on the rank where it is, so "
        "all ranks learn the total before any of them divides.",
        "share_of_loss adds the losses of the tokens that count and divides by the total that it is given. A rank "
        "without a token has the share 0, and a total of 0 must not divide.",
        "count = (targets != -100).sum().double(); all_reduce(count, ranks). cross_entropy(logits, targets, "
        "ignore_index=-100, reduction='sum') / max(total, 1.0). In sum_gradients a gradient that is None becomes "
        "torch.zeros_like(parameter), and then every gradient is all-reduced.",
    ),
)

averaged = Repair(
    "data_parallel-3",
    "Right in spite of the average",
    "Repair `backward_and_average(model, tokens, targets, average)` for ranks with unequal numbers of tokens.",
    cases=((1, [2]), (2, [3, 3]), (2, [1, 2]), (2, [4, 0]), (3, [2, 1, 5]), (4, [1, 1, 4, 2])),
    run=_averaged,
    reference=_averaged_alone,
    limits=_one_average,
    why=_why_not_summed,
    named="{0} rank(s) with {1} valid token(s)",
    without=OFF,
    right="gradients equal one process for equal and unequal shares, and average() ran once",
    minutes=15,
    points=3,
    trail=True,
    hints=(
        "Try two ranks with 1 and 2 valid tokens. By what should each rank's loss be multiplied?",
        "average() adds up N gradients and divides by N. Whatever you put into it comes out N times too small.",
        "N times the sum of this rank's losses, divided by the tokens of all ranks. Use reduction='sum': "
        "a rank without a token then has loss 0. A mean over no token is NaN, though torch's gradient of it is 0.",
    ),
)
