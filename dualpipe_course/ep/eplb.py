"""Exercises of "EPLB": a plan by hand, the greedy plan, a better one in four changes, padding that is an index.

Chapter: book/ep/eplb.  Plans are judged by their loads, not by their slots: any order of equal replicas will do.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.differences import apart
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, check_ints, ended, needs_function, needs_ints, partial_score

NAMES = ("replicas of the first", "load of the heaviest rank", "MiB of weights moved", "MiB of gradients sent")
EXPECTED = (2, 14, 9, 6)
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
_GENERAL = (
    "give a spare slot to the largest load / count, twice",
    "pack shares from heavy to light, into the lightest rank that has one of its three slots left",
    "3 slots of 3 * 1024 * 512 numbers of 2 bytes",
    "2 (R - 1) / R of the bytes of one expert in 32 bits",
)
LOADS, IN_FORCE = (45, 4, 96, 34, 8, 5, 6, 10, 345), (0, 6, 2, 4, 5, 3, 1, 8, 7, 1, 7, 5)
RANKS, CHANGES, LEAST, SCRATCH = 4, 4, 143.5, 176.5  # the least by trying all plans with four changes
CASES: tuple[tuple[list[float], int, int], ...] = (
    ([9, 2, 1], 4, 2),
    ([5, 1, 1, 1], 4, 1),
    ([12, 10, 3, 2], 6, 2),
    ([0, 0, 7, 0], 8, 4),
    ([0, 0, 0, 0], 4, 2),
    ([6, 5, 4, 3, 2, 2], 6, 2),
    ([20, 5, 4, 3, 2, 1], 6, 2),
    ([0.5, 0.25, 1.75, 0.125], 6, 3),
    ([2**25 + 1, 2**25, 3, 2, 1, 1], 8, 4),
    ([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], 16, 8),
    ([20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27], 24, 6),
)
_OWN = tuple(f"dualpipe_lab.ep.eplb.{name}" for name in ("placement", "balanced", "sticky"))


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("eplb"), exercise)


@exercise(
    "eplb-1",
    "Four experts in six slots",
    "predict",
    minutes=10,
    points=1,
    hints=(
        "Two slots are spare. Write down load / count of every expert before each of them is given away.",
        "Packing starts with 6, 6, 5, 5, 3, 2. Each rank takes three of them.",
        "An expert has 3 * 1024 * 512 numbers, which is 3 MiB in 16 bits.",
    ),
)
def numbers(answer: object) -> str:
    """Predict a greedy plan, the bytes that a new plan moves, and what replicas send to sum their gradients."""
    check_ints(answer, NAMES, EXPECTED, _SLIPS, _GENERAL)
    return "2 replicas, heaviest rank 14 beside a mean of 13.5, 9 MiB moved, 6 MiB summed"


@exercise(
    "eplb-2",
    "The global plan",
    "implement",
    minutes=15,
    points=3,
    hints=(
        "Two loops: one gives away num_slots - len(loads) spare slots, the other deals all replicas out.",
        "A spare slot goes to the expert whose load / count is largest at that moment, not whose load is.",
        "A rank that is full takes no more, however light it is; every rank has num_slots / num_ranks slots.",
    ),
)
def greedy(fn: Callable[..., Any]) -> str:
    """Write `make_plan(loads, num_slots, num_ranks)`: the greedy plan of one layer, as a list of experts."""
    needs_function(fn)
    given = [(list(loads), slots, ranks) for loads, slots, ranks in CASES]
    for case, (is_fine, found) in zip(CASES, call_each(Without(fn, *_OWN), given), strict=True):
        where = f"loads {case[0]}, {case[1]} slots, {case[2]} ranks"
        if not is_fine:
            raise Wrong(ended(where, found))
        _judge_greedy(where, found, *case)
    return f"{len(CASES)} layers, zero loads and loads beyond 2^24 included: replicas and ranks as light as greedy's"


@exercise(
    "eplb-3",
    "Four changes",
    "puzzle",
    minutes=25,
    points=3,
    hints=(
        "How many replicas of expert 8 can there be, if each is on a rank of its own and no rank is to exceed 143.5?",
        "Three replicas of 115 leave 28.5 tokens beside each. Expert 2 with 96 needs the fourth rank.",
        "Expert 0 with 45 fits nowhere as a whole: it needs a second replica, which takes the slot of a light expert "
        "that has two.",
    ),
)
def four_changes(answer: object) -> str:
    """Change at most four slots of a plan, so that its heaviest rank gets as light as four changes allow."""
    plan = needs_ints(answer, tuple(f"slot {slot}" for slot in range(len(IN_FORCE))))
    _check_legal(f"{len(plan)} slots", plan, len(LOADS), len(IN_FORCE))
    changed = sum(new != old for new, old in zip(plan, IN_FORCE, strict=True))
    heaviest = max(_totals(LOADS, plan, RANKS))
    if changed > CHANGES:
        raise Wrong(f"{changed} slots hold another expert than before, {CHANGES} may; {heaviest:.4g} on the heaviest")
    if heaviest > LEAST + 1e-9:
        first = max(_totals(LOADS, list(IN_FORCE), RANKS))
        beaten = ", below the plan from scratch" if heaviest < SCRATCH else ""
        totals = ", ".join(f"{total:.4g}" for total in _totals(LOADS, plan, RANKS))
        says = f"legal, {changed} changed{beaten}; ranks {totals}. The heaviest can come down to {LEAST}"
        raise Wrong(says, score=partial_score(heaviest, first, LEAST))
    return f"heaviest rank {LEAST}, mean 138.25; from scratch it was {SCRATCH}. No plan with four changes is lighter"


@exercise(
    "eplb-4",
    "The last slot",
    "find the bug",
    minutes=5,
    points=2,
    hints=(
        "Print slots for an expert with one replica where another has three. What does Python mean by index -1?",
        "The turns of an expert go round its own replicas. How many has it?",
        "number % counts[chosen] is always an index of a real slot.",
    ),
)
def turns(fn: Callable[..., Any]) -> str:
    """Repair `slots_of(chosen, slots, counts)`, which takes the padding of short rows for a slot."""
    import torch

    needs_function(fn)
    plans = [[0, 1, 2, 3], [0, 2, 1, 2, 2, 0], [3, 0, 3, 1, 3, 2, 3, 0], [0, 0, 0, 1]]
    cases = [_tokens(plan, num_tokens, seed) for seed, plan in enumerate(plans) for num_tokens in (0, 1, 50)]
    given = [(chosen.clone(), slots.clone(), counts.clone()) for _, chosen, slots, counts in cases]
    for (plan, chosen, _, counts), (is_fine, found) in zip(cases, call_each(fn, given), strict=True):
        where = f"slots hold experts {plan}, {len(chosen)} token(s)"
        if not is_fine:
            raise Wrong(ended(where, found))
        if not isinstance(found, torch.Tensor) or found.shape != chosen.shape or found.dtype != torch.int64:
            raise Wrong(f"{where}: return one slot for each token, a tensor of whole numbers")
        _judge_turns(where, plan, chosen.tolist(), found.tolist(), counts.tolist())
    return f"{len(cases)} cases: every token is at its expert, and replicas have equally many, give or take one"


def _judge_greedy(where: str, found: object, loads: Sequence[float], num_slots: int, num_ranks: int) -> None:
    from dualpipe_lab.ep.eplb import ExpertPlacement, rank_loads, rebalance_experts

    if not isinstance(found, list) or not all(type(expert) is int for expert in found):
        raise Wrong(f"{where}: return a list of whole numbers, the expert in each slot; got {type(found).__name__}")
    _check_legal(where, found, len(loads), num_slots)
    plan = ExpertPlacement(*rebalance_experts([loads], num_slots, 1, 1, num_ranks))
    count = Counter(found)
    ours = max(load / count[expert] for expert, load in enumerate(loads))
    theirs = max(load / int(n) for load, n in zip(loads, plan.counts[0], strict=True))
    if ours > theirs * (1 + 1e-12):
        both = apart(ours, theirs, 1e-12 * theirs)
        raise Wrong(
            f"{where}: the heaviest replica has {both.found}; with the right spare replicas it has {both.expected}"
        )
    heaviest, least = max(_totals(loads, found, num_ranks)), float(rank_loads([loads], plan, num_ranks).max())
    if heaviest > least * (1 + 1e-12):
        both = apart(heaviest, least, 1e-12 * least)
        says = f"the replicas are right, the heaviest rank has {both.found}"
        raise Wrong(f"{where}: {says}; heavy ones first, into the lightest rank with room, makes it {both.expected}")


def _check_legal(where: str, plan: Sequence[int], num_experts: int, num_slots: int) -> None:
    if len(plan) != num_slots:
        raise Wrong(f"{where}: the plan has {len(plan)} slots, not {num_slots}; every rank has equally many")
    if strange := [expert for expert in plan if not 0 <= expert < num_experts]:
        raise Wrong(f"{where}: there is no expert {strange[0]}; they count from 0 to {num_experts - 1}")
    if missing := sorted(set(range(num_experts)) - set(plan)):
        raise Wrong(f"{where}: expert {missing[0]} has no slot; its tokens would have nowhere to go")


def _totals(loads: Sequence[float], plan: Sequence[int], num_ranks: int) -> list[float]:
    count, size = Counter(plan), len(plan) // num_ranks
    shares = [loads[expert] / count[expert] for expert in plan]
    return [sum(shares[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]


def _tokens(plan: list[int], num_tokens: int, seed: int) -> tuple[list[int], Any, Any, Any]:
    """The plan, chosen_T, slots_EM and counts_E."""
    import numpy as np
    import torch

    from dualpipe_lab.ep.eplb.placement import make_placement

    made = make_placement(np.array([plan]), max(plan) + 1)
    chosen = torch.randint(max(plan) + 1, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return plan, chosen, made.logical_to_physical[0], made.counts[0]


def _judge_turns(where: str, plan: list[int], chosen: list[int], found: list[int], counts: list[int]) -> None:
    for token, (expert, slot) in enumerate(zip(chosen, found, strict=True)):
        if not 0 <= slot < len(plan):
            raise Wrong(
                f"{where}: token {token} goes to slot {slot}, which does not exist; -1 means no further replica"
            )
        if plan[slot] != expert:
            raise Wrong(f"{where}: token {token} chose expert {expert}, and slot {slot} holds expert {plan[slot]}")
    for expert in range(max(plan) + 1):
        visits = Counter(slot for slot, other in zip(found, chosen, strict=True) if other == expert)
        each = [visits[slot] for slot, other in enumerate(plan) if other == expert]
        if max(each) - min(each) > 1:
            raise Wrong(f"{where}: the {counts[expert]} replicas of expert {expert} get {each} tokens; they take turns")
