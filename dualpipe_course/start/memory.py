"""The exercise of "Where the memory goes": the part `memory`.

Chapter: book/start/memory.  Bytes are whole numbers and compared exactly.
"""

from dualpipe_course.own.part import Alone, Part
from dualpipe_course.plain import plain

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
