"""Exercises of "Where the memory goes": the part `memory`, and the fewest GPUs.

Chapter: book/start/memory.  Bytes are whole numbers and compared exactly.
The puzzle trains Llama 3 70B on sequences of 8,192 tokens.  A rank of stage s of p, with n layers, holds in bytes
  states        (2 / Z3 + 2 / Z2 + 12 / Z1) P    P: the parameters of its stage over tp; Zi = dp if zero >= i, else 1
  gathered      4 M / tp under ZeRO-3            the weights and gradients of one layer
  activations   2 T (p - s) n K / tp, or recomputed 2 T ((p - s) n h + K) / tp
  logits        12 T V / tp on the last stage
"""

from collections.abc import Mapping, Sequence

from dualpipe_course.declared import Puzzle
from dualpipe_course.own.part import Alone, Part
from dualpipe_course.plain import plain
from dualpipe_course.trial import partial_score
from dualpipe_course.wrong import Wrong

# numel, num_shared, dtype_bytes, saved_bytes, num_live
HELD = (
    (9, 2, 8, 20, 0),
    (6, 1, 8, 10, 0),
    (6, 1, 8, 100, 3),
    (7, 3, 8, 50, 2),
    (7, 3, 2, 51, 1),
    (0, 4, 8, 24, 5),
    (2, 5, 4, 9, 0),
    (8_030_261_249, 64, 4, 6_308_233_216, 4),
    (671_026_419_200, 7, 2, 1, 1),
)

TOKENS, HIDDEN, KEYS, FFN, LAYERS, VOCABULARY = 8_192, 8_192, 1_024, 28_672, 80, 128_256
MATRICES = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * FFN
KEPT = 9 * HIDDEN + 2 * KEYS + 4 * FFN
ROOM, BUDGET, START = 72 * 10**9, 18, 40
FIELDS = ("tp", "layers", "dp", "zero", "recompute")


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


def _look(numel: int, num_shared: int, dtype_bytes: int, saved_bytes: int, num_live: int) -> str:
    """What is wrong with `rank_bytes`, in words."""
    from mine.memory import rank_bytes

    case = numel, num_shared, dtype_bytes, saved_bytes, num_live
    found, expected = plain(rank_bytes(*case)), _bytes(*case)
    if type(found) is not int:
        return f"it returned {found!r}, and bytes are a whole number: an int"
    if found == expected:
        return ""
    slips = {_bytes(*case, slip=slip): words for slip, words in _SLIPS.items()}
    return f"got {found:,}, expected {expected:,} bytes{slips.get(found, '')}"


_SLIPS = {
    "floor": ": a shard is rounded up, because the last rank's is padded",
    "whole moments": ": each rank keeps the two moments of its shard alone",
    "all in shards": ": weights and gradients are whole on every rank, and the moments alone are sharded",
    "gradients in shards": ": the gradients are whole on every rank, and the moments alone are sharded",
    "one moment": ": Adam keeps two moments",
    "no gradients": ": the gradients belong to it",
    "one microbatch": ": the activations belong to live microbatches, to all of them and to no other",
    "numbers": ": saved_bytes are bytes already, and not numbers of dtype_bytes each",
    "adam": ": that is the page's 16 bytes; your trainer has one dtype, and no master weights",
}


def _bytes(numel: int, num_shared: int, dtype_bytes: int, saved_bytes: int, num_live: int, slip: str = "") -> int:
    """Bytes by counting tensor by tensor; with a slip, what that mistake makes of them.

    >>> _bytes(7, 3, 8, 50, 2)
    260
    """
    shard = numel // num_shared if slip == "floor" else -(-numel // num_shared)
    weights, gradients, moments = numel, numel, [shard, shard]
    if slip == "whole moments":
        moments = [numel, numel]
    if slip == "all in shards":
        weights = gradients = shard
    if slip in ("gradients in shards", "no gradients"):
        gradients = shard if slip == "gradients in shards" else 0
    if slip == "one moment":
        moments = [shard]
    live = 1 if slip == "one microbatch" else num_live
    saved = saved_bytes * dtype_bytes if slip == "numbers" else saved_bytes
    if slip == "adam":
        return 16 * numel + live * saved
    return dtype_bytes * sum([weights, gradients, *moments]) + live * saved


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


memory = Part(
    "memory-4",
    "memory",
    "What a rank keeps",
    "Write rank_bytes: weights, gradients, two moments of a shard, and the activations of live microbatches.",
    names=("rank_bytes",),
    trials=(Alone(_look, HELD, "{0:,} weights of {2} bytes, moments shared by {1}, {4} times {3:,} bytes live"),),
    right="right to the byte in 9 cases, a rank without weights and one without activations included",
    minutes=10,
    points=3,
    hints=(
        "Write a line for each tensor: weights, gradients, first moment, second moment. Which of them does every rank "
        "have whole?",
        "A shard has numel / num_shared numbers, rounded up. -(-a // b) rounds a quotient of ints up, without a float.",
        "shard = -(-numel // num_shared); the four tensors have 2 * numel + 2 * shard numbers, of dtype_bytes each; "
        "every live microbatch adds saved_bytes.",
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
