"""Exercises of "EPLB": a plan by hand, and one for ranks of two speeds.

Chapter: book/ep/eplb.  Plans are judged by their loads, not by their slots: any order of equal replicas will do.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.differences import apart
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

NAMES = ("replicas of the first", "load of the heaviest rank", "MiB of weights moved", "MiB of gradients sent")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        3: "after the first spare slot its replicas have 6 each; is that still the heaviest share?",
        1: "two of the six slots are spare, and they go where a replica is heaviest",
    },
    {
        13: "that is the other rank; all wait for the heavier one",
        15: "that is the plan in which the first expert has three replicas: replicate by load / count",
        12: "six slots, two of them spare: 12 does not stay on one rank as a whole",
    },
    {3: "one expert alone has 3 MiB", 18: "those are numbers of 32 bits; weights have 16 here"},
    {
        3: "the gradients have 4 bytes per number",
        12: "an all-reduce over R ranks sends 2 (R - 1) / R of its bytes, and R is the number of replicas",
    },
)
# loads, slots, speed of each rank, replicas that an expert may have; whichever way a tie goes, the last rank is
# done at the same time
CASES: tuple[tuple[list[float], int, list[float], int], ...] = (
    ([9, 2, 1], 4, [1, 1], 2),
    ([9, 2, 1], 6, [1.5, 1], 2),
    ([9, 2, 1], 8, [1, 1], 2),
    ([5, 1, 1, 1], 4, [1], 3),
    ([12, 10, 3, 2], 6, [1, 2], 1),
    ([0, 0, 7, 0], 8, [1, 1, 2, 1], 3),
    ([0, 0, 0, 0], 4, [1, 3], 1),
    ([20, 5, 4, 3, 2, 1], 6, [2.5, 1], 1),
    ([0.5, 0.25, 1.75, 0.125], 6, [1, 0.5, 1.75], 3),
    ([2**25 + 1, 2**25, 3, 2, 1, 1], 8, [1, 1, 2, 2], 2),
    ([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], 16, [1, 1, 1, 1, 1.5, 1.5, 1.5, 1.5], 2),
    ([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], 24, [1, 1, 1, 1.25], 4),
    ([20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27], 24, [1, 1.5, 1, 1.5, 1, 1.5], 3),
    ([45, 4, 96, 34, 8, 5, 6, 10, 345], 16, [1.75, 1, 1.25, 1], 4),
)
_OWN = ("dualpipe_lab.ep.eplb.placement",)


def _check_plan(
    where: str, found: object, loads: Sequence[float], num_slots: int, speeds: Sequence[float], most: int
) -> None:
    if not isinstance(found, list) or not all(type(expert) is int for expert in found):
        raise Wrong(f"{where}: return a list of whole numbers, the expert in each slot; got {type(found).__name__}")
    held = [expert for expert in found if expert != -1]
    _check_legal(where, [0 if expert == -1 else expert for expert in found], len(loads), num_slots, held)
    count, room = Counter(held), num_slots // len(speeds)
    expert, replicas = count.most_common(1)[0]
    if replicas > most:
        raise Wrong(f"{where}: expert {expert} has {replicas} replicas")
    if (empty := num_slots - len(held)) != (least := max(0, num_slots - most * len(loads))):
        raise Wrong(f"{where}: {empty} slot(s) stay empty; {least} must, the others can hold one more replica")
    shares, plan = _greedy(loads, num_slots, speeds, most)
    ours = max(load / count[expert] for expert, load in enumerate(loads))
    if ours > max(shares) * (1 + 1e-12):
        both = apart(ours, max(shares), 1e-12 * max(shares))
        raise Wrong(
            f"{where}: the heaviest replica has {both.found}; with the right spare replicas it has {both.expected}"
        )
    theirs = max(sum(shares[i] for i in own) / speed for own, speed in zip(plan, speeds, strict=True))
    parts = [[i for i in found[r * room :][:room] if i != -1] for r in range(len(speeds))]
    last = max(sum(loads[i] / count[i] for i in own) / speed for own, speed in zip(parts, speeds, strict=True))
    if last > theirs * (1 + 1e-12):
        both = apart(last, theirs, 1e-12 * theirs)
        says = f"the replicas are right, the last rank is done after {both.found} ticks"
        raise Wrong(f"{where}: {says}; each to the rank that is done first with it, makes it {both.expected}")


def _greedy(
    loads: Sequence[float], num_slots: int, speeds: Sequence[float], most: int
) -> tuple[list[float], list[list[int]]]:
    """A replica's share by expert, and the experts of each rank."""
    counts = [1] * len(loads)
    while sum(counts) < min(num_slots, most * len(loads)):
        allowed = [i for i, n in enumerate(counts) if n < most]
        counts[max(allowed, key=lambda i: loads[i] / counts[i])] += 1
    shares = [load / n for load, n in zip(loads, counts, strict=True)]
    ranks: list[list[int]] = [[] for _ in speeds]
    for expert in sorted((i for i, n in enumerate(counts) for _ in range(n)), key=lambda i: -shares[i]):
        free = [r for r, held in enumerate(ranks) if len(held) < num_slots // len(speeds)]
        ends = {r: (sum(shares[i] for i in ranks[r]) + shares[expert]) / speeds[r] for r in free}
        ranks[min(free, key=lambda r: ends[r])].append(expert)
    return shares, ranks


def _check_legal(
    where: str, plan: Sequence[int], num_experts: int, num_slots: int, held: Sequence[int] | None = None
) -> None:
    if len(plan) != num_slots:
        raise Wrong(f"{where}: the plan has {len(plan)} slots, not {num_slots}; every rank has equally many")
    if strange := [expert for expert in plan if not 0 <= expert < num_experts]:
        raise Wrong(f"{where}: there is no expert {strange[0]}; they count from 0 to {num_experts - 1}")
    if missing := sorted(set(range(num_experts)) - set(plan if held is None else held)):
        raise Wrong(f"{where}: expert {missing[0]} has no slot; its tokens would have nowhere to go")


def _judge_greedy(fn: Callable[..., Any]) -> str:
    given = [(list(loads), slots, list(speeds), most) for loads, slots, speeds, most in CASES]
    for case, (is_fine, found) in zip(CASES, call_each(Without(fn, *_OWN), given), strict=True):
        where = f"loads {case[0]}, {case[1]} slots, speeds {case[2]}, at most {case[3]} replica(s)"
        if not is_fine:
            raise Wrong(ended(where, found))
        _check_plan(where, found, *case)
    return f"{len(CASES)} layers, loads of zero and beyond 2^24 included: replicas and ranks as light as greedy's"


numbers = Predict(
    "eplb-1",
    "Four experts in six slots",
    NAMES,
    lambda a, b, c, k, n: (2, (a + b) / 2 + c, k * 3 * n / 1024, 6 * n / 1024),
    "have the loads {a}, {b}, {c} and 2.",
    "changes the expert of {k} slots",
    "three matrices of {n} by 512 in",
    minutes=10,
    points=1,
    hints=(
        "Two slots are spare. Write down load / count of every expert before each of them is given away.",
        "Packing starts with 6, 6, 5, 5, 3, 2. Each rank takes three of them.",
        "An expert has 3 * 1024 * 512 numbers, which is 3 MiB in 16 bits.",
    ),
    slips=_SLIPS,
    a=(12, 14, 16),
    b=(10, 12),
    c=(3, 4),
    k=(3, 2, 4),
    n=(1024, 2048),
    called={"a": "loads", "b": "", "c": "", "k": "changed slots", "n": "rows of a matrix"},
)

greedy = Implement(
    "eplb-2",
    "Ranks of two speeds",
    "Write `make_plan(loads, num_slots, speeds, most)`: the greedy plan of a layer on ranks of different speeds.",
    judge=_judge_greedy,
    minutes=20,
    points=3,
    hints=(
        "Two loops: one gives away num_slots - len(loads) spare slots, the other deals all replicas out.",
        "An expert that has `most` replicas drops out of the first loop; the heaviest share of the rest gets the slot.",
        "A rank of speed 2 with 6 tokens is done before a rank of speed 1 with 4. Compare after the replica was added; "
        "a rank that is full takes no more.",
    ),
)
