"""Exercises of "Weights from elsewhere": what a rank reads, half a head.

Chapter: book/whole/weights.  Rows are judged exactly; tensors are compared number by number, each number told apart.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Numbers, Off, in_words
from dualpipe_course.declared import Predict, Repair

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("first row", "bytes of k_proj", "places of down_proj", "bytes of down_proj", "bytes of all ranks")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        320: "an eighth of 512 rows is half a head; two ranks read the same whole head",
        640: "there are only 512 rows: 4 KV heads, each of which two ranks read",
        128: "neighbours share a KV head: ranks 0 and 1 have head 0",
        2: "that is the KV head; each has 128 rows",
    },
    {
        262_144: "half a head; a rank reads 128 rows",
        2_097_152: "that is the whole tensor of 512 rows",
        1_048_576: "a number in bf16 has 2 bytes",
    },
    {
        1: "the file goes row by row, and this tensor is cut by columns",
        768: "that is how many columns the rank reads, one piece of them in every row",
        6144: "there is a row for each output, and down_proj has 2,048 outputs",
    },
    {
        25_165_824: "that is the whole tensor; the rank reads 768 of 6,144 columns",
        1_572_864: "a number in bf16 has 2 bytes",
        6_291_456: "a number in bf16 has 2 bytes",
    },
    {
        2_097_152: "that is the tensor once; every KV head is read by two ranks",
        8_388_608: "8 ranks read one head each, and a whole tensor has 4",
    },
)


def _told_apart(shape: tuple[int, ...], number: int = 0) -> "Tensor":
    """A tensor of whole numbers of which no two are equal, nor equal to those of a tensor of another number."""
    import torch

    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 10_000 * number


def _halve(rank: int, world_size: int, fn: Callable[..., Any], num_heads: int, num_kv_heads: int, size: int) -> Found:
    q, k = _told_apart((num_heads * size, 3)), _told_apart((num_kv_heads * size, 3), 1)
    found = fn(q.clone(), k.clone(), num_heads, num_kv_heads)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise TypeError("return two tensors: the rows of q and those of k")

    def right(weight: "Tensor", heads: int) -> "Tensor":
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def backwards(weight: "Tensor", heads: int) -> "Tensor":
        return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    slips = {
        name: {
            "the rows are as they came": Numbers.of(weight),
            "this goes from halves to neighbours, the other way": Numbers.of(backwards(weight, heads)),
        }
        for name, weight, heads in (("q", q, num_heads), ("k", k, num_kv_heads))
    }
    if num_heads // num_kv_heads > 1 and size * num_kv_heads % (2 * num_heads) == 0:
        slips["k"]["pairs lie within a part of a head: k has fewer heads than q"] = Numbers.of(right(k, num_heads))
    return Found(
        dict(zip(("q", "k"), map(Numbers.of, found), strict=True)),
        {"q": Numbers.of(right(q, num_heads)), "k": Numbers.of(right(k, num_kv_heads))},
        slips,
    )


def _order_in_words(off: Off) -> str:
    if off.found is None or off.has_other_shape or off.slip:
        return in_words(off)
    row, wanted = (int(value.flat[off.place]) % 10_000 // 3 for value in (off.found, off.expected))
    return f"{off.name}: row {off.place // 3} is row {row} of the given one, expected row {wanted}"


numbers = Predict(
    "weights-1",
    "What rank 5 reads",
    NAMES,
    lambda h, d, f: (2 * d, 2 * d * h, h, h * f / 4, 16 * d * h),
    "A model has {h:,} features",
    "4 KV heads of {d} features, and {f:,} features inside",
    minutes=8,
    points=1,
    hints=(
        "Four KV heads for eight ranks: ranks 0 and 1 read head 0, ranks 2 and 3 read head 1.",
        "A matrix in a file has a row per output and a column per input. down_proj has 2,048 outputs.",
        "Every rank reads one whole KV head, also where another rank reads the same one.",
    ),
    slips=_SLIPS,
    h=(2048, 1024, 4096),
    d=(128, 64),
    f=(6144, 4096, 5120, 8192, 10_240),
    called={"h": "features", "d": "features of a head", "f": "features inside"},
)


halves = Repair(
    "weights-4",
    "Right at the first token",
    "Repair `to_halves(q, k, num_heads, num_kv_heads)`, whose logits are right at the first token alone.",
    cases=((1, 2, 2, 4), (1, 1, 1, 8), (1, 4, 2, 8), (1, 6, 1, 4), (1, 4, 4, 12)),
    run=_halve,
    why=_order_in_words,
    tolerance=0,
    named="{1} query and {2} KV head(s) of {3} features",
    right="rows of queries and keys are in the order of halves, whatever the heads",
    minutes=12,
    points=2,
    hints=(
        "Number the rows of one head: 0 to 7. Which order should they have, and which do they get?",
        "(heads, 2, d/2) reads a head as two halves. It comes as pairs of neighbours: what are the sizes of that?",
        "How many heads does k have? A view with too many heads fits as well, and pairs rows within half a head.",
    ),
)
