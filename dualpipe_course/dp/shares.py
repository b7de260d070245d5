"""Shares of a batch for checks: a small language model, tokens of which some do not count, and one process as judge.

A share is written as the numbers of valid tokens of its microbatches: `[[2, 1], [], [0]]` is three ranks, of which one
has no microbatch and one a microbatch without a target.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from dualpipe_course.differences import difference
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong
from dualpipe_lab.launch.causes import cause_of_ratio

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dualpipe_lab.launch.launcher import Results

Shares: TypeAlias = Sequence[Sequence[int]]  # by rank and microbatch: valid tokens
Grads: TypeAlias = list[list[float]]  # by parameter, in plain numbers; nothing where there is no gradient

VOCABULARY, WIDTH, ROW, IGNORE_INDEX = 8, 6, 4, -100
LIBRARY = tuple(
    f"dualpipe_lab.dp.{name}" for name in ("data_parallel", "buckets", "ddp", "zero1", "zero2", "zero3")
)  # switched off while an answer runs
NUM_TRAINED = VOCABULARY * WIDTH + WIDTH * VOCABULARY
GRADIENT_BYTES = 8 * NUM_TRAINED


def make_model() -> "nn.Module":
    """An embedding, a frozen scale and a linear layer, equal in every process."""
    import torch
    from torch import nn

    torch.manual_seed(11)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY, bias=False), nn.PReLU()
    ).double()
    model[3].requires_grad_(False)
    return model


def microbatch(num_valid: int, seed: int) -> "tuple[Tensor, Tensor]":
    """Tokens and targets of enough rows of 4 for so many valid targets; at least one row, the rest is ignored."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (max(-(-num_valid // ROW), 1), ROW)
    tokens, targets = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
    targets.view(-1)[num_valid:] = IGNORE_INDEX
    return tokens, targets


def microbatches(shares: Shares, rank: int) -> "list[tuple[Tensor, Tensor]]":
    """The microbatches of a rank."""
    return [microbatch(valid, 100 * rank + place) for place, valid in enumerate(shares[rank])]


def grads_of(model: "nn.Module") -> Grads:
    """The gradients of a model in plain numbers."""
    return [[] if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def reference(shares: Shares) -> tuple[Grads, float]:
    """Gradients and loss of the mean over all valid tokens of all ranks, on one process."""
    found: tuple[Grads, float] = on_ranks(_reference, 1, shares, case="the reference")[0]
    return found


def _reference(rank: int, world_size: int, shares: Shares) -> tuple[Grads, float]:
    import torch
    from torch.nn.functional import cross_entropy

    model = make_model()
    batch = [part for owner in range(len(shares)) for part in microbatches(shares, owner)]
    tokens, targets = (torch.cat(parts) for parts in zip(*batch, strict=True))
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    return grads_of(model), loss.item()


def mean_of_means(shares: Shares) -> Grads:
    """The gradients that follow where each rank divides by its own tokens and the ranks are averaged."""
    found: Grads = on_ranks(_mean_of_means, 1, shares, case="the mean of means")[0]
    return found


def _mean_of_means(rank: int, world_size: int, shares: Shares) -> Grads:
    import torch
    from torch.nn.functional import cross_entropy

    model = make_model()
    for owner in range(len(shares)):
        tokens, targets = (torch.cat(parts) for parts in zip(*microbatches(shares, owner), strict=True))
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        (loss / len(shares)).backward()
    return grads_of(model)


def why_different(found: Grads, expected: Grads, num_ranks: int) -> str | None:
    """What is wrong with gradients, in words, or None."""
    if [len(part) for part in found] != [len(part) for part in expected]:
        place = next(i for i, part in enumerate(expected) if len(part) != len(found[i]))
        if not found[place]:
            return "a trained parameter has no gradient there; the other ranks' part of the sum is missing"
        return "a frozen parameter has got a gradient; leave parameters out that do not require one"
    ours, theirs = [x for part in found for x in part], [x for part in expected for x in part]
    if any(x != x for x in ours):
        return "the gradients are not numbers: a rank divided 0 by 0"
    off = difference(ours, theirs)
    if off is None or off.ratio is None:
        return None if off is None else f"the gradients {off}"
    return f"the gradients are {off.ratio:.4g} times those of one process{cause_of_ratio(off.ratio, num_ranks)}"


def check_sums(results: "Results", num_bytes: int, allowed: int, case: str, why: str) -> None:
    """Raise `Wrong` unless the ranks sent one all-reduce of `num_bytes`, and at most `allowed` bytes beside it."""
    num_ranks, sent = len(results), results.ledger.sent()
    expected = 2 * (num_ranks - 1) * num_bytes
    if not expected <= sent <= expected + 2 * (num_ranks - 1) * allowed:
        raise Wrong(
            f"{case}: the ranks sent {sent:,} bytes in all; one sum of the {num_bytes:,} bytes of gradients sends "
            f"{expected:,}, and a few numbers beside it. {why}"
        )


def named(shares: Shares) -> str:
    """A case in words."""

    def words(own: Iterable[int]) -> str:
        return " and ".join(map(str, own)) or "nothing"

    return f"{len(shares)} rank(s) with {', '.join(map(words, shares))} valid token(s)"
