"""Exercises of "Weights from elsewhere": what a rank reads, rows of a fused tensor, a family's names, half a head.

Chapter: book/whole/weights.  Rows are judged exactly; tensors are compared number by number, each number told apart.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Numbers, Off, Unchanged, compare_on_ranks, in_words
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.wrong import Wrong

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
SIZES = (("two KV heads", 4, 2, 8), ("as many KV heads as query heads", 3, 3, 4), ("one KV head", 2, 1, 6))
_TRANSPOSED = "the numbers are those of the transposed matrix"
_IN_ORDER = "these rows are cut as if all query heads came first, then all KV heads, then all value heads"
_SWAPPED = "gate and up are exchanged"


def _cases() -> Iterator[tuple[int, int, int, int, int]]:
    """Ranks that divide the query heads, the smallest first; in the last the ranks do not divide the key heads."""
    for num_ranks, num_heads, num_kv_heads, size in (
        (1, 1, 1, 2),
        (1, 4, 2, 3),
        (2, 4, 2, 2),
        (2, 4, 4, 8),
        (2, 4, 1, 4),
        (4, 8, 2, 4),
        (3, 12, 6, 5),
        (8, 8, 4, 2),
        (8, 32, 8, 128),
        (16, 32, 8, 128),
        (2, 12, 3, 1),
        (3, 12, 2, 4),
        (4, 20, 5, 2),
        (6, 30, 10, 3),
    ):
        yield from ((rank, num_ranks, num_heads, num_kv_heads, size) for rank in range(num_ranks))


def _judge_rows(
    where: str, found: object, rank: int, num_ranks: int, num_heads: int, num_kv_heads: int, size: int
) -> None:
    is_pairs = isinstance(found, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in found)
    if not is_pairs or not all(type(row) is int for pair in found for row in pair):  # type: ignore[attr-defined]
        raise Wrong(f"{where}: return pairs of numbers, the first row and the one behind the last, got {found}")
    rows = [row for start, stop in found for row in range(start, stop)]  # type: ignore[attr-defined]
    heads, group = num_heads // num_ranks, num_heads // num_kv_heads
    first, last = rank * heads // group, ((rank + 1) * heads - 1) // group
    spans = (
        ("query", rank * heads, (rank + 1) * heads),
        ("key", num_heads + first, num_heads + last + 1),
        ("value", num_heads + num_kv_heads + first, num_heads + num_kv_heads + last + 1),
    )
    for what, start, stop in spans:
        wanted = range(start * size, stop * size)
        if missing := sorted(set(wanted) - set(rows)):
            raise Wrong(f"{where}: row {missing[0]} is missing; the {what} heads are rows {wanted[0]} to {wanted[-1]}")
    right = [row for _, start, stop in spans for row in range(start * size, stop * size)]
    if surplus := sorted(set(rows) - set(right)):
        raise Wrong(f"{where}: row {surplus[0]} belongs to a head that this rank does not use")
    if rows != right:
        raise Wrong(f"{where}: all rows are there, but not once and in the order query, key, value")


def _told_apart(shape: tuple[int, ...], number: int = 0) -> "Tensor":
    """A tensor of whole numbers of which no two are equal, nor equal to those of a tensor of another number."""
    import torch

    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 10_000 * number


def _made_up(num_heads: int, num_kv_heads: int, size: int) -> "tuple[dict[str, Tensor], dict[str, Tensor]]":
    """A model of two layers: by Llama's published names, and as the made-up family stores it."""
    hidden, numbers = num_heads * size, count()
    ends = {"embed_tokens": (7, hidden), "norm": (hidden,), "lm_head": (7, hidden)}
    tensors = [_told_apart(shape, next(numbers)) for shape in ends.values()]
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    published = dict(zip(names, tensors, strict=True))
    state = {name: tensor.clone() for name, tensor in zip(("embed", "norm", "head"), tensors, strict=True)}
    keys = (num_kv_heads * size, hidden)
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": keys,
        "self_attn.v_proj": keys,
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (10, hidden),
        "mlp.up_proj": (10, hidden),
        "mlp.down_proj": (hidden, 10),
    }
    for layer in range(2):
        parts = {name: _told_apart(shape, next(numbers)) for name, shape in shapes.items()}
        published |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
        state |= {f"block.{layer}.{name}": part for name, part in _stored(list(parts.values()), num_kv_heads).items()}
    return published, state


def _stored(parts: "list[Tensor]", num_kv_heads: int) -> "dict[str, Tensor]":
    """The tensors of a layer as the made-up family stores them."""
    import torch

    norm_1, norm_2, q, k, v, o, gate, up, down = parts
    heads = [part.unflatten(0, (num_kv_heads, -1)) for part in (q, k, v)]
    return {
        "norm_1": norm_1.clone(),
        "norm_2": norm_2.clone(),
        "qkv": torch.cat(heads, 1).flatten(0, 1),
        "out": o.t().contiguous(),
        "gate_up": torch.cat([gate, up]),
        "down": down.t().contiguous(),
    }


def _rename(rank: int, world_size: int, fn: Callable[..., Any], num_heads: int, num_kv_heads: int, size: int) -> Found:
    published, state = _made_up(num_heads, num_kv_heads, size)
    unchanged = Unchanged(**state)
    found = fn(dict(state), num_heads, num_kv_heads)
    if not isinstance(found, dict):
        raise TypeError(f"return a dictionary of tensors by Llama's names, got {type(found).__name__}")
    if surplus := sorted(set(map(str, found)) - set(published)):
        return Found({}, {}, refused=f"{surplus[0]} is no name of a Llama")
    slips = {name: _slips_of(name, published, state, num_heads, num_kv_heads, size) for name in published}
    return Found(
        {name: Numbers.of(tensor) for name, tensor in found.items()},
        {name: Numbers.of(tensor) for name, tensor in published.items()},
        slips,
        changed="" if unchanged.first() is None else f"the argument {unchanged.first()} has changed; work on a copy",
    )


def _slips_of(
    name: str, published: "dict[str, Tensor]", state: "dict[str, Tensor]", num_heads: int, num_kv_heads: int, size: int
) -> dict[str, Numbers | None]:
    """What typical mistakes make of a tensor."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return {_TRANSPOSED: Numbers.of(published[name].t().contiguous())}
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        other = name.replace("gate", "up") if "gate" in name else name.replace("up_proj", "gate_proj")
        return {_SWAPPED: Numbers.of(published[other])}
    if "self_attn" in name:
        rows = [heads * size for heads in (num_heads, num_kv_heads, num_kv_heads)]
        parts = state[f"block.{name.split('.')[2]}.qkv"].split(rows)
        return {_IN_ORDER: Numbers.of(parts["qkv".index(name.split(".")[4][0])])}
    return {}


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


def _judge_renamed(fn: Callable[..., Any], what: Any, num_heads: Any, num_kv_heads: Any, head_size: Any) -> None:
    compare_on_ranks(_rename, 1, fn, num_heads, num_kv_heads, head_size, case=what, why=in_words, at=": ", tolerance=0)


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


renamed = Implement(
    "weights-3",
    "The names of another family",
    "Write `renamed(state, num_heads, num_kv_heads)`: a made-up family's tensors under Llama's published names.",
    cases=SIZES,
    judge=_judge_renamed,
    right=f"all tensors have Llama's names, shapes and numbers for {len(SIZES)} kinds of heads",
    minutes=20,
    points=4,
    hints=(
        "Begin with a table of the names that need nothing but a new name, and copy these tensors.",
        "qkv.unflatten(0, (num_kv_heads, -1, head_size)) has a row of heads for each KV head: some queries, one key, "
        "one value. What is head_size, if qkv has (num_heads + 2 num_kv_heads) head_size rows?",
        "out and down are stored with a row per input. A square matrix fits either way: turn both round.",
    ),
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
