"""Exercises of "GShard": slots, bytes and drops, and the order of choices.

Chapter: book/ep/gshard.  Slots are judged in plain Python.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.differences import shape
from dualpipe_course.ep import gates
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

NAMES = ("slots", "bytes sent", "choices dropped", "first choices dropped")
_SLIPS: tuple[dict[int, str], ...] = (
    {4: "that is the even load; the capacity factor comes on top", 3: "each token has two choices", 20: "per rank"},
    {
        1920: "that is one exchange; dispatch and combine each have a way back",
        3840: "that is the forward; gradients travel the same two ways",
        10240: "a quarter of the slots belong to this rank's own experts and stay",
        6144: "slots travel whether a token is in them or not, and there are 5 for each expert",
    },
    {
        4: "second choices are dropped too",
        5: "an expert's first and second choices share its slots",
        0: "expert 0 is chosen 11 times",
    },
    {6: "first choices come first: five of the nine find a slot", 0: "expert 0 is the first choice of nine tokens"},
)
# tokens, experts, choices, slots of each expert
SLOT_CASES = ((1, 2, 2, 1), (3, 2, 2, 2), (4, 3, 2, 2), (6, 4, 1, 2), (9, 5, 3, 4), (5, 3, 3, 5), (0, 4, 2, 1))
LIBRARY = ("dualpipe_lab.ep.gshard",)


class _Lists:
    """An answer that gets a tensor and returns a list."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, indices: list[list[int]], k: int, num_experts: int, each: int) -> Any:
        import torch

        found = self.fn(torch.tensor(indices, dtype=torch.int64).view(-1, k), num_experts, each)
        assert found.dtype == torch.int64, f"slots are {found.dtype}; they are indices of rows, torch.int64"
        return found.tolist()


def _why(routed: gates.RoutedTokens, found: list[list[int]]) -> str:
    kept = [slot for row in found for slot in row if slot >= 0]
    if len(set(kept)) != len(kept):
        return "; a slot has two tokens: each choice is counted behind the ones before it"
    return "; first choices of later tokens come before second choices of earlier ones" if routed.k > 1 else ""


def _judge_slots(fn: Callable[..., Any]) -> str:
    routed = [gates.chosen(gates.draw(tokens, experts), experts, k) for tokens, experts, k, _ in SLOT_CASES]
    cases = [(each.indices, each.k, each.num_experts, case[3]) for each, case in zip(routed, SLOT_CASES, strict=True)]
    results = call_each(_Lists(Without(fn, *LIBRARY)), cases)
    for case, each, (is_fine, found) in zip(SLOT_CASES, routed, results, strict=True):
        where = f"{case[0]} token(s), {case[1]} experts, {case[2]} choice(s), {case[3]} slot(s) each"
        if not is_fine:
            raise Wrong(ended(where, found))
        if shape(found) != shape(each.indices):
            raise Wrong(f"{where}: slots of shape {shape(found)}, expected one for each choice")
        if found != (expected := gates.slots_of(each, case[3])):
            raise Wrong(f"{where}: chosen {each.indices}: slots {found}, expected {expected}{_why(each, found)}")
    return f"right in {len(SLOT_CASES)} cases, with every expert chosen and with no token"


numbers = Predict(
    "gshard-1",
    "Five slots",
    NAMES,
    lambda h, a, b: (5, 480 * h, a - 3 + max(b - 4, 0), a - 5),
    "Hidden size {h}, float32",
    ": {a}, 1, 0, {b}, 1, 3, 0, 0 as first",
    minutes=10,
    points=1,
    hints=(
        "16 tokens with 2 choices are 4 for each of 8 experts.",
        "A rank has E * C slots to send, those of its own experts stay. Count dispatch, combine, and both backwards.",
        "An expert keeps five. First choices are all before second ones.",
    ),
    slips=_SLIPS,
    h=(16, 8, 24, 32, 48, 64),
    a=(9, 7, 8, 10),
    b=lambda a, **_: 11 - a,
    called={"h": "hidden size"},
)

slots = Implement(
    "gshard-2",
    "Who gets a slot",
    "Write the slot of every choice.",
    judge=_judge_slots,
    minutes=20,
    points=3,
    hints=(
        "Put all choices in one line: first choices of all tokens, then second choices. What is indices.t()?",
        "A choice's place is how many before it in the line want the same expert: a cumulative sum, or a stable sort.",
        "Places from C on have no slot. View the line as [K, T] and transpose it back.",
    ),
)
