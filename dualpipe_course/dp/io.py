"""Exercises of "IO: save and load": who reads what, a run that must not notice.

Chapter: book/dp/io.  Two ranks with dropout go on from ten steps, and are compared with the uninterrupted run bit by
bit.
"""

from collections.abc import Callable, Iterable
from typing import Any

from dualpipe_course.declared import Predict, Repair
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

NAMES = ("bytes in the last file", "files for rank 1", "bytes from file 1", "ranges in all")
BEFORE, AFTER, RANKS = 10, 3, 2
SKIPPED = (4, 7)  # batches whose gradients overflowed: the data has gone on, the optimizer has not
NEXT = BEFORE + len(SKIPPED)


def _judge_resume(fn: Callable[..., Any]) -> str:
    for rank, problem in enumerate(on_ranks(_resume, RANKS, fn, case=f"resuming after {BEFORE} steps")):
        if problem:
            raise Wrong(f"rank {rank} of {RANKS}, resumed after {BEFORE} steps: {problem}")
    return "two ranks with dropout go on bit by bit as the uninterrupted run"


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


who_reads = Predict(
    "io-1",
    "Who reads what",
    NAMES,
    lambda: (12, 2, 24, 6),
    minutes=8,
    points=1,
    hints=(
        "Shards have ceil(10 / 4) = 3 elements, until there are none left. Which elements are in file 3?",
        "On 3 ranks the shards have 4 elements. Draw both cuts above each other on one line.",
        "For each weight there are two moments: three numbers of 4 bytes.",
    ),
    slips=(
        {
            36: "the first three files have 3 elements each, so the last one has what is left",
            30: "elements are not cut; the first three files have 3 elements each",
            4: "one element is a weight and its two moments",
            24: "ceil(10 / 4) = 3, so the first three files hold 9 elements",
        },
        {
            3: "rank 1 of 3 holds elements 4 to 7; in which files of 3 elements are they?",
            1: "rank 1 of 3 holds elements 4 to 7; file 1 has 3 to 5 only",
        },
        {
            36: "element 3 is in file 1 too, but it goes to rank 0",
            8: "each element comes with two moments",
            48: "that is all that rank 1 reads, from both files",
            12: "elements 4 and 5 are in file 1",
        },
        {
            4: "two of the files are read by two ranks",
            7: "count the borders: 3 inside the old cut, 2 inside the new one, and none of them coincide",
            3: "a rank may need more than one file",
            18: "that counts the weights and both moments; count ranges of elements",
        },
    ),
)


resume = Repair(
    "io-4",
    "Resumed, not continued",
    "Repair `resume(saved, adam, rank)` so that a run does not notice that it was interrupted.",
    judge=_judge_resume,
    minutes=12,
    points=2,
    hints=(
        "What does Adam need besides weights and moments? Look at the attributes of the optimizer.",
        "Which rank's random numbers does rank 1 get?",
        "adam.num_steps is the step of the bias correction; saved['random'] has one state per rank.",
    ),
)
