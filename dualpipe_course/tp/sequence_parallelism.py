"""Exercises of "Sequence parallelism": what a pair sends and keeps, lengths that do not divide, a partial bias.

Chapter: book/tp/sequence-parallelism.  Outputs and gradients are judged against one process, messages by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.switched_off import Without
from dualpipe_course.tp import layers
from dualpipe_course.variants import Known

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("bytes forward", "bytes backward", "bytes kept, gathered again", "bytes kept, gathered input kept")
_BIAS = {
    "dbias": ". A rank adds the bias to its own tokens, and so it finds the partial sum of these tokens",
    "y": ". The bias belongs to every token once",
}
# ranks, tokens, features, width of the middle: among them ranks without tokens
UNEVEN = ((1, 3, 2, 3), (2, 4, 3, 4), (2, 3, 2, 4), (3, 7, 2, 3), (4, 7, 3, 8), (4, 5, 2, 4), (4, 1, 2, 4))


def _slips(h: int, t: int, tokens: int) -> Known:
    size = 2 * tokens * h  # bytes of all tokens at an end
    half = size * (t - 1) // t
    share = {2: "half", 4: "a quarter", 8: "an eighth"}[t]
    return (
        (
            (half, "that is one half; an all-gather enters the pair, and a reduce-scatter leaves it"),
            (2 * size, "of each half, (t - 1) / t of its bytes leave a rank"),
            (4 * half, "those are two all-reduces; each of the two collectives is half of one"),
            (4 * tokens * 2048 * (t - 1) // t, f"the middle never travels; {h} features do"),
        ),
        (
            (2 * half, "that is without the second gather"),
            (half, "dy is gathered, dx is scattered, and the input of the first matrix is gathered again"),
            (3 * size, "of each half, (t - 1) / t of its bytes leave a rank"),
        ),
        (
            (size / t, "that is one of the two inputs"),
            (2 * size, "that is what a rank keeps if it has all tokens"),
            (size, f"each rank keeps {share} of the tokens of both inputs"),
            (size / t + size, "that is with the gathered input kept"),
        ),
        (
            (2 * size, f"the norm's input is cut: a rank keeps {share} of its tokens"),
            (size, "that is the gathered input alone; the norm keeps its input too"),
            (2 * size / t, "the input of the first matrix stays as it was gathered, with all tokens"),
        ),
    )


_SUMS = ". A rank's product with its part of a matrix is a summand: sum those of all ranks, then keep a rank's tokens"
_TOKENS = {"y": _SUMS, "dx": _SUMS}


class _Tokens:
    """A function that is told the number of all tokens."""

    def __init__(self, fn: Callable[..., Any], num_tokens: int) -> None:
        self.fn, self.num_tokens = fn, num_tokens

    def __call__(self, *tensors: "Tensor") -> Any:
        return self.fn(*tensors, self.num_tokens)


def _pair(x: "Tensor", first: "Tensor", second: "Tensor") -> "Tensor":
    return (x @ first.t()).tanh() @ second.t()


def _biased(x: "Tensor", first: "Tensor", second: "Tensor", bias: "Tensor") -> "Tensor":
    return _pair(x, first, second) + bias


def _judge_uneven(fn: Callable[..., Any], num_ranks: Any, tokens: Any, features: Any, wide: Any) -> None:
    shape = (tokens, features)
    shapes = {"x": shape, "first": (wide, features), "second": (features, wide)}
    case = layers.Case(num_ranks, shapes, {"x": 0, "first": 0, "second": 1}, shape, 0)
    answer = Without(_Tokens(fn, tokens), *layers.LIBRARY)
    size = layers.num_bytes((-(-tokens // num_ranks) * num_ranks, features))
    why = "An all-gather and a reduce-scatter of the padded tokens each way are enough."
    layers.check_layer(answer, _pair, case, forward=size, backward=size, because=why, hints=_TOKENS)


def _judge_bias(fn: Callable[..., Any]) -> str:
    sizes: tuple[tuple[int, tuple[int, ...], int], ...] = ((1, (2, 2), 3), (2, (2, 3), 4), (4, (4, 2), 8))
    for num_ranks, shape, wide in (*sizes, (4, (2, 8, 3), 6)):  # the last rank has no features
        features = shape[-1]
        shapes = {"x": shape, "first": (wide, features), "second": (features, wide), "bias": (features,)}
        case = layers.Case(num_ranks, shapes, {"x": -2, "first": 0, "second": 1, "bias": None}, shape, -2)
        size = layers.num_bytes(shape)
        back = size + layers.num_bytes((features,))
        why = "Beside the tokens, the gradient of the bias alone is summed."
        layers.check_layer(fn, _biased, case, forward=size, backward=back, because=why, hints=_BIAS)
    return f"output and all gradients equal one process in {len(sizes) + 1} cases"


numbers = Predict(
    "sequence_parallelism-1",
    "A pair between cut tokens",
    NAMES,
    lambda h, t, tokens: (
        4 * tokens * h * (t - 1) // t,
        6 * tokens * h * (t - 1) // t,
        4 * tokens * h // t,
        2 * tokens * h // t + 2 * tokens * h,
    ),
    "have {h} features at both ends",
    "{t} ranks share them",
    "A microbatch has {tokens:,} tokens",
    minutes=10,
    points=1,
    trail=True,
    hints=(
        "1,024 tokens of 512 features have 1,048,576 bytes; a half sends 3/4 of them per rank.",
        "Two halves in the forward. In the backward: dy, dx, and once more the input of the first matrix.",
        "The norm keeps the tokens of its rank. What does the first matrix keep in either way?",
    ),
    slips=_slips,
    h=(512, 256, 768),
    t=(4, 2, 8),
    tokens=(1024, 512, 2048),
    called={"h": "features", "t": "ranks"},
)

uneven = Implement(
    "sequence_parallelism-2",
    "Seven tokens on four ranks",
    "Write `pair(x, first, second, num_tokens)` for lengths that do not divide by the ranks.",
    cases=UNEVEN,
    judge=_judge_uneven,
    right=f"outputs and gradients equal one process in {len(UNEVEN)} cases, ranks without tokens included",
    minutes=25,
    points=3,
    hints=(
        "size = -(-num_tokens // t) is the quotient rounded up. How many tokens has rank r? It may have none.",
        "The padding of the gather lies behind the last token, so full[:num_tokens] cuts it off.",
        "pad(x, (0, 0, 0, n)) adds n rows of zeros. The backward of Gather is scatter, that of Scatter is gather.",
    ),
)

bias = Repair(
    "sequence_parallelism-3",
    "A bias behind the reduce-scatter",
    "Repair a pair between cut tokens whose bias has a partial gradient.",
    judge=_judge_bias,
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Which tokens does a rank add the bias to?",
        "The page has a weight with the same problem. Which operator sums its gradient?",
        "copy_to_ranks is the identity in the forward and an all-reduce in the backward.",
    ),
)
