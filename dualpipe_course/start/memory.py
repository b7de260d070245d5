"""Exercises of "Where the memory goes": another recipe, the bytes of one rank, the fewest GPUs.

Chapter: book/start/memory.  Bytes are whole numbers and compared exactly.
The puzzle trains Llama 3 70B on sequences of 8,192 tokens.  A rank of stage s of p, with n layers, holds in bytes
  states        (2 / Z3 + 2 / Z2 + 12 / Z1) P    P: the parameters of its stage over tp; Zi = dp if zero >= i, else 1
  gathered      4 M / tp under ZeRO-3            the weights and gradients of one layer
  activations   2 T (p - s) n K / tp, or recomputed 2 T ((p - s) n h + K) / tp
  logits        12 T V / tp on the last stage
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dualpipe_course.declared import Implement, Predict, Puzzle
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended, partial_score
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong

NAMES = ("bytes per parameter", "bytes before the first update", "GB", "GPUs", "numbers kept", "GB of activations")


class Sizes(NamedTuple):
    """Parameters of a model: matrices of a layer, a norm's weight, the table, and whether the head is the table."""

    matrices: int
    norm: int
    table: int
    tied: bool


# layers by stage, stage, tp, dp, zero
SPLITS: tuple[tuple[list[int], int, int, int, int], ...] = (
    ([2], 0, 1, 1, 0),
    ([2, 1], 0, 1, 1, 0),
    ([2, 1], 1, 2, 1, 0),
    ([2, 3, 1], 1, 2, 1, 0),
    ([2, 3, 1], 2, 1, 3, 1),
    ([3, 3], 0, 2, 3, 2),
    ([3, 3], 1, 2, 5, 3),
    ([4], 0, 2, 7, 3),
    ([1, 1, 1, 1], 3, 4, 4, 1),
)
MODELS = (Sizes(96, 8, 160, False), Sizes(96, 8, 160, True))

TOKENS, HIDDEN, KEYS, FFN, LAYERS, VOCABULARY = 8_192, 8_192, 1_024, 28_672, 80, 128_256
MATRICES = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * FFN
KEPT = 9 * HIDDEN + 2 * KEYS + 4 * FFN
ROOM, BUDGET, START = 72 * 10**9, 18, 40
FIELDS = ("tp", "layers", "dp", "zero", "recompute")


def _slips(billions: int, layers: int, f: int) -> Known:
    kept, giga = 73_216 + 4 * f, layers * 4096 / 1e9
    grouped = kept - 2 * (6_656 - 1_024)
    return (
        (
            (16, "that is the page's recipe; here the gradient has 4 bytes and each moment 2"),
            (12, "the gradient is fp32 here, or there are two moments of 2 bytes each: one of them is missing"),
            (18, "both moments are bf16 here, 2 bytes each"),
            (10, "the two moments belong to the training too"),
        ),
        (
            (14, "the moments do not exist before the first update"),
            (12, "neither of the two moments exists before the first update"),
            (6, "the master weights are there from the start"),
            (8, "the gradient has 4 bytes here"),
        ),
        (
            (16 * billions, "that is for 16 bytes per parameter"),
            (2 * billions, "that is the weights alone"),
            (10 * billions, "that is before the first update; the moments come then and stay"),
        ),
        ((5, "five GPUs have 400 GB"), (7, f"{14 * billions} GB fit into six GPUs")),
        (
            (
                grouped,
                "that is with grouped keys of 1,024 features; here keys and values are as wide as the hidden size",
            ),
            (kept - 2 * 6_656, "keys and values are kept as well, each h wide"),
            (kept - 6_656, "keys and values are two tensors"),
            (kept - f, "four tensors of the feed-forward network's width are kept"),
        ),
        (
            (round(kept * giga / 2), "a bf16 number has 2 bytes"),
            (round(kept * giga * 2), "that is for fp32, 4 bytes per number"),
            (round(kept * giga / layers), "that is one layer"),
            (round(grouped * giga), "keys and values are h wide here"),
        ),
    )


_SHARDED = ("", "masters and moments", "gradients", "weights")  # by each level of ZeRO, beside those before
_COUNTS = {
    "floor": "a shard is rounded up: the last rank's is padded",
    "norms cut": "tp cuts no norm; every rank of tp has all norms of its stage",
    "no head": "the last stage has a head, as large as the table",
    "no last norm": "the last stage has one norm more than its layers have",
    "tied apart": "the last stage needs the tied table too, and on another stage that is a second copy",
    "tied twice": "one stage that has both ends holds a tied table once",
    "one stage only": "a ZeRO stage shards what the stages below it shard as well",
    "no tp": "tp cuts matrices, table and head",
    "even": "the stages are uneven: count the layers of this one",
}


def bytes_of(sizes: Sizes, layers: Sequence[int], stage: int, tp: int, dp: int, zero: int, slip: str = "") -> int:
    """Bytes of one rank; with a slip, what that mistake makes of them.

    >>> bytes_of(Sizes(96, 8, 160, False), [2], 0, 1, 1, 0)
    8832
    """
    first, last = stage == 0, stage == len(layers) - 1
    count = sum(layers) // len(layers) if slip == "even" else layers[stage]
    has_head = last and not (sizes.tied and (first or slip == "tied apart")) and slip != "no head"
    if slip == "tied twice":
        has_head = last
    cut = count * sizes.matrices + (first + has_head) * sizes.table
    norms = (2 * count + (last and slip != "no last norm")) * sizes.norm
    if slip == "norms cut":
        norms //= tp
    parameters = (cut if slip == "no tp" else cut // tp) + norms
    shard = parameters // dp if slip == "floor" else -(-parameters // dp)
    reached = zero - 1 if slip == "a level less" else zero
    sharded = [zero == level if slip == "one stage only" else reached >= level for level in (1, 2, 3)]
    return sum(size * (shard if cut else parameters) for size, cut in zip((12, 2, 2), sharded, strict=True))


def held_bytes(stage: int, tp: int, layers: Sequence[int], dp: int, zero: int, recompute: bool) -> float:
    """Bytes of a rank of a stage of the puzzle; the formulas stand at the top."""
    count, waiting = layers[stage], len(layers) - stage
    last = stage == len(layers) - 1
    parameters = (count * MATRICES + ((stage == 0) + last) * VOCABULARY * HIDDEN) / tp
    by_level = zip((12, 2, 2), (1, 2, 3), strict=True)
    held = sum(size * parameters / (dp if zero >= level else 1) for size, level in by_level)
    if zero == 3:
        held += 4 * MATRICES / tp
    kept = waiting * count * HIDDEN + KEPT if recompute else waiting * count * KEPT
    return held + 2 * TOKENS * kept / tp + last * 12 * TOKENS * VOCABULARY / tp


def _parse(answer: object) -> tuple[int, list[int], int, int, bool]:
    """The fields of a legal plan; raise `Wrong` with the rule that is broken."""
    if not isinstance(answer, Mapping) or set(answer) != set(FIELDS):
        raise Wrong(f"this check takes a dict with the fields {', '.join(FIELDS)}")
    fields = {name: plain(answer[name]) for name in FIELDS}
    tp, layers, dp, zero, recompute = (fields[name] for name in FIELDS)
    if any(type(fields[name]) is not int for name in ("tp", "dp", "zero")) or type(recompute) is not bool:
        raise Wrong("tp, dp and zero are whole numbers, recompute is True or False")
    if not isinstance(layers, list) or not layers or any(type(n) is not int or n < 1 for n in layers):
        raise Wrong("layers is a list with the number of layers of every stage, at least one layer each")
    if sum(layers) != LAYERS:
        raise Wrong(f"the stages have {sum(layers)} layers together, the model has {LAYERS}")
    if tp not in (1, 2, 4, 8) or dp < 1 or zero not in (0, 1, 2, 3):
        raise Wrong("tp is 1, 2, 4 or 8, dp is at least 1, zero is 0 to 3")
    if zero > 1 and len(layers) > 1:
        raise Wrong("ZeRO-2 and ZeRO-3 are not allowed with more than one stage")
    return tp, layers, dp, zero, recompute


def _judge_rank_bytes(fn: Callable[..., Any]) -> str:
    cases = [(sizes, *split) for sizes in MODELS for split in SPLITS]
    outcomes = call_each(fn, cases)
    for case, (fine, value) in zip(cases, outcomes, strict=True):
        sizes, layers, stage, tp, dp, zero = case
        tied = "tied" if sizes.tied else "not tied"
        where = f"layers {layers}, stage {stage}, tp {tp}, dp {dp}, ZeRO-{zero}, {tied}"
        if not fine:
            raise Wrong(ended(where, value))
        expected, found = bytes_of(*case), plain(value)
        if type(found) is not int or found != expected:
            slips = {bytes_of(*case, slip="a level less"): f"under ZeRO-{zero} the {_SHARDED[zero]} are sharded too"}
            slips |= {bytes_of(*case, slip=slip): words for slip, words in _COUNTS.items()}
            why = slips.get(found, "count parameters first, then bytes") if type(found) is int else "an int is needed"
            raise Wrong(f"{where}: got {found if type(found) in (int, float) else type(found).__name__}, "
                        f"expected {expected} bytes: {why}")  # fmt: skip
    return f"right to the byte in {len(cases)} cases, uneven stages and tied heads included"


def _judge_fewest(answer: object) -> str:
    tp, layers, dp, zero, recompute = _parse(answer)
    gpus = tp * len(layers) * dp
    held = [held_bytes(stage, tp, layers, dp, zero, recompute) for stage in range(len(layers))]
    worst = max(range(len(layers)), key=held.__getitem__)
    words = f"{gpus} GPUs; stage {worst} holds {held[worst] / 1e9:.1f} GB of 72"
    if held[worst] > ROOM:
        raise Wrong(f"does not fit: {words}")
    if gpus > BUDGET:
        raise Wrong(f"legal: {words}; {BUDGET} GPUs are enough", score=partial_score(gpus, START, BUDGET))
    return f"{gpus} GPUs, the fewest that these rules allow"


numbers = Predict(
    "memory-1",
    "Another recipe",
    NAMES,
    lambda billions, layers, f: (
        14,
        10,
        14 * billions,
        -(-14 * billions // 80),
        73_216 + 4 * f,
        round((73_216 + 4 * f) * layers * 4096 / 1e9),
    ),
    "has {billions} billion parameters in {layers} layers",
    "a feed-forward network of {f:,}.",
    minutes=10,
    points=1,
    trail=True,
    hints=(
        "Write the page's table of five rows with the sizes of this recipe.",
        "Which rows of that table exist before the optimizer has made a step?",
        "Without grouped keys, keys and values have as many features as the hidden size: h_kv = h.",
    ),
    slips=_slips,
    billions=(32, 30, 31, 33, 34),
    layers=(60, 56, 58, 62),
    f=(17_920, 17_408, 18_432),
    called={"billions": "billion parameters", "f": "width of the feed-forward network"},
)

rank_bytes = Implement(
    "memory-2",
    "The bytes of one rank",
    "Write `rank_bytes(sizes, layers, stage, tp, dp, zero)`: weights, gradients and states of one rank.",
    judge=_judge_rank_bytes,
    minutes=25,
    points=3,
    trail=True,
    hints=(
        "First count parameters: what is cut by tp, and what every rank of tp has whole?",
        "The first stage has a table, the last one a head and the last norm. When is a tied head no second matrix?",
        "shard = -(-count // dp) is the quotient rounded up; which of 2, 2 and 12 bytes does each ZeRO stage multiply "
        "with it?",
    ),
)

fewest = Puzzle(
    "memory-3",
    "The fewest GPUs",
    "Find a plan for Llama 3 70B on at most 18 GPUs of 80 GB.",
    judge=_judge_fewest,
    minutes=20,
    points=3,
    hints=(
        "The states alone take 1,129 GB. On how many GPUs of 72 GB do they fit, if nothing else is there?",
        "Gathered layers and one sequence for every rank of dp cost memory. Which axes share a sequence?",
        "With tp 2 a stage in the middle has room for nine layers or ten. What do the first and the last stage hold "
        "beside their layers?",
    ),
)
