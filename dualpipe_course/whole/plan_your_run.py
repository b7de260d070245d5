"""Exercises of "Plan your run": which rank is full, and a slow network.

Chapter: book/whole/plan-your-run.  Memory and seconds are those of `memory` and `estimate`.
"""

from collections.abc import Sequence
from dataclasses import replace

from dualpipe_course.declared import Predict, Puzzle
from dualpipe_course.trial import partial_score
from dualpipe_course.wrong import Wrong
from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import H100, Plan, estimate, memory

NAMES = ("fullest rank", "its GB", "fullest rank with recomputation", "its GB")
_SLIPS: tuple[dict[int, str], ...] = (
    {3: "logits take 10 GB there, but rank 0 keeps four microbatches and the last rank one"},
    {
        41: "this is the last rank: 27 of states, 4 kept, 10 of logits and loss",
        59: "rank 0 keeps min(4 - 0, 8) = 4 microbatches of 4 layers, not 8",
        34: "the table of 0.5 billion weights lies on rank 0 too: 9 GB more",
        31: "rank 0 keeps four microbatches, not one",
    },
    {0: "rank 0 now has 27 + 4 + 1 GB; the last rank's logits did not shrink"},
    {
        32: "this is rank 0: 27 of states, 4 kept, 1 anew",
        39: "logits and the layer that is computed anew are not there at once: the loss is over by then",
        28: "logits and loss take 10 GB on the last rank",
    },
)
MODEL = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
LENGTH, BATCH, RANKS, GB = 8192, 64, 16, 10**9
SLOW = replace(H100, card=6.25e9)
LIMIT_BYTES, LIMIT_SECONDS = 45 * GB, 4.95


def _fullest(each: int, logits: int) -> Sequence[float]:
    held = [1.5 * each, each, each, 1.5 * each]
    plain = [weights + 4 * (4 - rank) + logits * (rank == 3) for rank, weights in enumerate(held)]
    again = [weights + (4 - rank) + (logits if rank == 3 else 1) for rank, weights in enumerate(held)]
    return plain.index(max(plain)), max(plain), again.index(max(again)), max(again)


def _judge_slow_network(answer: object) -> str:
    if answer is ...:
        raise Wrong("not answered yet: give a lab.Plan")
    if type(answer) is not Plan:
        raise Wrong(f"give a lab.Plan, got {type(answer).__name__}")
    if answer.world_size != RANKS or answer.precision != "bfloat16":
        raise Wrong(f"this puzzle is about {RANKS} ranks in bfloat16, got {answer}")
    try:
        needs = memory(MODEL, answer, LENGTH, BATCH).largest.total
        seconds = estimate(MODEL, answer, LENGTH, BATCH, hardware=SLOW).point
    except ValueError as error:
        raise Wrong(f"no legal plan: {error}") from None
    found = f"{answer}: {needs / GB:.1f} GB of {LIMIT_BYTES / GB:.0f}, {seconds:.2f} s of {LIMIT_SECONDS}"
    if needs > LIMIT_BYTES:
        raise Wrong(f"{found}; its largest rank needs too much")
    if seconds > LIMIT_SECONDS:
        raise Wrong(f"{found}; it is too slow", score=partial_score(seconds, 2 * LIMIT_SECONDS, LIMIT_SECONDS))
    return f"a plan within {LIMIT_BYTES / GB:.0f} GB and {LIMIT_SECONDS} s on a slow network"


numbers = Predict(
    "plan_your_run-1",
    "Which rank is full",
    NAMES,
    _fullest,
    "holds {each} bytes per weight",
    "Logits and loss of a microbatch take {logits} GB",
    minutes=10,
    points=2,
    hints=(
        "Rank 0 has 4 x 0.25 + 0.5 billion weights. How many microbatches does rank r of 1F1B keep?",
        "Rank r keeps min(4 - r, 8) microbatches of 4 layers; only the last rank has logits.",
        "With recomputation everybody keeps a quarter of that. The logits stay as they are.",
    ),
    slips=_SLIPS,
    each=(18, 16, 20),
    logits=(10, 5, 6, 7, 8, 9, 11),
    called={"each": "bytes per weight", "logits": "GB of logits"},
)


slow_network = Puzzle(
    "plan_your_run-3",
    "A slow network",
    "Give a plan of 16 ranks within a budget of memory and one of seconds on cards of 6.25 GB/s.",
    judge=_judge_slow_network,
    minutes=20,
    points=3,
    hints=(
        "Which axis sends least between two nodes? print(estimate(...).parts) of plans with one axis across.",
        "With pp 2 across, a node of 8 GPUs holds half of the layers. More microbatches make the bubble smaller.",
        "ZeRO-1 or 2 shards the states; along cp a GPU keeps less of each sequence; recomputation costs a third more "
        "arithmetic.",
    ),
)
