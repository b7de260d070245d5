"""Judging a resume: two ranks with dropout go on from ten steps, and must not notice.

Chapter: book/dp/io.  In: a learner's function.  Out: nothing, or a `Wrong` that says what was forgotten.
"""

from collections.abc import Callable, Iterable
from typing import Any

from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

BEFORE, AFTER, RANKS = 10, 3, 2
SKIPPED = (4, 7)  # batches whose gradients overflowed: the data has gone on, the optimizer has not
NEXT = BEFORE + len(SKIPPED)


def check_resume(fn: Callable[..., Any]) -> None:
    """Raise `Wrong` unless `fn(saved, adam, rank)` brings back weights, moments, steps, random numbers, the place."""
    results = on_ranks(_resume, RANKS, fn, case=f"resuming after {BEFORE} steps")
    for rank, problem in enumerate(results):
        if problem:
            raise Wrong(f"rank {rank} of {RANKS}, resumed after {BEFORE} steps: {problem}")


def _make(seed: int) -> Any:
    import torch
    from torch import nn

    from dualpipe_lab.dp.adam import AdamW

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    return model, AdamW(model.parameters(), lr=0.01)


def _train(model: Any, adam: Any, numbers: Iterable[int]) -> None:
    import torch

    for number in numbers:
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4) * (number + 1)
        adam.zero_grad()
        model(x).square().mean().backward()
        adam.step()


def _state(adam: Any, random: list[Any], number: int) -> dict[str, Any]:
    return {
        "parameters": [p.detach().clone() for p in _parameters(adam)],
        "moments": [(first.clone(), second.clone()) for first, second in _moments(adam)],
        "num_steps": _num_steps(adam),
        "random": random,
        "next_batch": number,
    }


def _parameters(adam: Any) -> list[Any]:
    return list(adam.param_groups[0]["params"])


def _moments(adam: Any) -> list[tuple[Any, Any]]:
    return [(adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"]) for p in _parameters(adam)]


def _num_steps(adam: Any) -> int:
    steps = {int(adam.state[p]["step"]) for p in _parameters(adam)}
    return steps.pop() if len(steps) == 1 else -1


def _resume(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    import torch

    from dualpipe_lab import comm

    model, adam = _make(0)
    torch.manual_seed(100 + rank)
    _train(model, adam, (number for number in range(NEXT) if number not in SKIPPED))
    saved = _state(adam, comm.all_gather_object(torch.get_rng_state()), NEXT)
    kept = _state(adam, [], NEXT)
    _train(model, adam, range(NEXT, NEXT + AFTER))
    other, again = _make(77)
    _train(other, again, range(3))  # what is there before must not matter
    found = fn(saved, again, rank)
    problem = _forgotten(found, again, kept, saved["random"], rank)
    if problem:
        return problem
    _train(other, again, range(found, NEXT + AFTER))
    if not _equal(saved["moments"], kept["moments"]) or not _equal([saved["parameters"]], [kept["parameters"]]):
        return "training changed what was saved, so a second resume would start elsewhere; copy into the optimizer"
    if not _equal([_parameters(adam)], [list(other.parameters())]):
        return "three steps later the weights differ from the uninterrupted run's"
    return ""


def _forgotten(found: object, adam: Any, kept: dict[str, Any], random: list[Any], rank: int) -> str:
    """What does not equal the state that was saved."""
    import torch

    from dualpipe_lab.dp.adam import AdamW

    if type(adam) is not AdamW:
        return "the optimizer is another object; bring back the state of the one that is given"
    if not _equal([[p.detach() for p in _parameters(adam)]], [kept["parameters"]]):
        return "the weights are not those that were saved"
    if not _equal(_moments(adam), kept["moments"]):
        return "the moments are not those that were saved"
    if (made := _num_steps(adam)) != kept["num_steps"]:
        beta1, beta2, total = 0.9, 0.999, BEFORE + 1
        first = (1 - beta1**total) / (1 - beta1 ** (made + 1))
        factor = first * ((1 - beta2 ** (made + 1)) / (1 - beta2**total)) ** 0.5
        return (
            f"the optimizer counts {made} steps, {BEFORE} were made; its bias correction makes the next update "
            f"{factor:.2f} times the right one"
        )
    state = torch.get_rng_state()
    if not torch.equal(state, random[rank]):
        if torch.equal(state, random[0]):
            return "its random numbers are those of rank 0, so the ranks drop the same units"
        return "its random numbers do not go on where they were, so dropout draws other masks"
    if type(found) is not int or found != kept["next_batch"]:
        return f"the next batch is number {kept['next_batch']}, you returned {found!r}"
    return ""


def _equal(ours: Any, theirs: Any) -> bool:
    import torch

    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)]
    return all(torch.equal(a.detach(), b.detach()) for a, b in pairs)
