"""Exercises of "Row-parallel": what a pair of layers sends, the pair itself, a bias that every rank adds.

Chapter: book/tp/row-parallel.  Outputs and gradients are judged against one process, messages by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.switched_off import Without
from dualpipe_course.tp import layers
from dualpipe_course.variants import Known

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("numbers held", "bytes forward", "bytes backward", "multiple of the bias")
# ranks, shape of x, width of the middle: on 4 ranks 6 features are cut into 2 2 2 0
SIZES = (
    (1, (3, 2), 2), (2, (1, 2), 2), (2, (3, 2), 4), (2, (2, 3, 4), 5),
    (3, (5, 3), 3), (4, (3, 4), 6), (4, (2, 3, 4), 8),
)  # fmt: skip

DEALT = (*SIZES, (2, (2, 3), 4), (4, (3, 5), 4))  # with 5 outputs on 4 ranks the biases are 2 2 1 0
_BIASED = {
    "dbias": ". The output is right, but the bias must learn on every rank as it does on one",
    "y": ". Subtract the right output: what is left is a multiple of the bias",
}


def _slips(h: int, f: int, tokens: int) -> Known:
    return (
        (
            (f / 2 * h, "that is the two weights; the layers have biases too"),
            (f / 4 * (2 * h + 1), f"the second bias is added to the whole output: every rank has all {h} of it"),
            (
                f / 4 * (2 * h + 1) + h / 4,
                "the second bias is added to the whole output, and every rank has it; it is not cut",
            ),
            (f / 2 * h + f + h, f"the first bias belongs to the outputs of the middle: a rank has {f // 4} of the {f}"),
            (2 * f * h + f + h, "that is both layers whole"),
        ),
        (
            (6 * tokens * f, f"that sums the middle; it stays cut, and y has {h} numbers for each token"),
            (4 * tokens * h, "those are the bytes of y; an all-reduce sends 2 (t - 1) / t of them"),
            (3 * tokens * h, "that is the reduce-scatter alone; an all-gather of the finished sums follows"),
            (12 * tokens * h, "one sum forward: that of the second layer"),
        ),
        (
            (0, "the first layer's input is read by all ranks: its gradient is summed"),
            (6 * tokens * f, "that sums the gradient of the middle; each rank needs its own slice alone"),
            (12 * tokens * h, "one sum backward: that of the first layer's dx"),
        ),
        ((1, "every one of the 4 partial sums contains the bias, and the sum contains it as often"),),
    )


class _First:
    """A function that is told where this rank's biases begin."""

    def __init__(self, fn: Callable[..., Any], outputs: int) -> None:
        self.fn, self.outputs = fn, outputs

    def __call__(self, *tensors: "Tensor") -> Any:
        from dualpipe_lab import comm

        size = -(-self.outputs // comm.get_world_size())
        return self.fn(*tensors, min(comm.get_rank() * size, self.outputs))


def _judge(fn: Callable[..., Any], num_ranks: int, shape: tuple[int, ...], inputs: int) -> None:
    """The case has `inputs` features, cut over the ranks, and as many outputs as the shape has columns."""
    x_shape, out_shape = (*shape[:-1], inputs), shape
    shapes = {"x": x_shape, "weight": (shape[-1], inputs), "bias": shape[-1:]}
    case = layers.Case(num_ranks, shapes, {"x": -1, "weight": 1, "bias": None}, out_shape)
    why = "Only y is summed, once, and no gradient."
    size = layers.num_bytes(out_shape)
    layers.check_layer(fn, _linear, case, forward=size, because=why, hints=_BIASED)


def _linear(x: "Tensor", weight: "Tensor", bias: "Tensor") -> "Tensor":
    from torch.nn.functional import linear

    return linear(x, weight, bias)


def _judge_layer(fn: Callable[..., Any], num_ranks: Any, shape: Any, inputs: Any) -> None:
    outputs = shape[-1]
    shapes = {"x": (*shape[:-1], inputs), "weight": (outputs, inputs), "bias": (outputs,)}
    case = layers.Case(num_ranks, shapes, {"x": -1, "weight": 1, "bias": 0}, shape)
    answer = Without(_First(fn, outputs), *layers.LIBRARY)
    why = "Only y is summed, once: a bias travels inside of it."
    layers.check_layer(answer, _linear, case, forward=layers.num_bytes(shape), because=why)


numbers = Predict(
    "row_parallel-1",
    "What a pair holds and sends",
    NAMES,
    lambda h, f, tokens: (f / 4 * (2 * h + 1) + h, 6 * tokens * h, 6 * tokens * h, 4),
    "from {h} to {f} features",
    "from {f} to {h}, both",
    "They get {tokens} tokens",
    minutes=8,
    points=1,
    trail=True,
    hints=(
        "A quarter of 24 is 6. The first weight has 6 rows of 8 here, the second 8 rows of 6.",
        "The middle never travels. Each direction sums 6 tokens of 8 numbers, 2 (t - 1) / t of their bytes per rank.",
        "If each of the 4 partial sums contains b, what does their sum contain?",
    ),
    slips=_slips,
    h=(8, 6, 10, 12),
    f=(24, 16, 20, 32),
    tokens=(6, 5, 8, 10),
    called={"h": "features", "f": "features in the middle"},
)

layer = Implement(
    "row_parallel-2",
    "A sharded bias",
    "Write `row_linear(x, weight, bias, first)`: the whole output on every rank from a sharded bias.",
    cases=DEALT,
    judge=_judge_layer,
    right=f"outputs and gradients equal one process in {len(DEALT)} cases, ranks without a bias included; one sum",
    minutes=15,
    points=3,
    hints=(
        "linear(x, weight), without the bias, is this rank's partial sum of every output. Who may add which bias?",
        "A number that one rank alone adds to its partial sum is in the sum once. The others' biases need no message.",
        "pad(bias, (first, outputs - first - len(bias))) has zeros elsewhere. The backward of g returns grad as it is.",
    ),
)

biased = Repair(
    "row_parallel-3",
    "A bias on every rank",
    "Repair a row-parallel layer whose output contains the bias once per rank.",
    cases=SIZES,
    judge=_judge,
    right=f"outputs and gradients equal one process in {len(SIZES)} cases, with a single sum",
    minutes=6,
    points=2,
    trail=True,
    hints=(
        "Set x to zero. What is the output on one rank, and what on four?",
        "Dividing the bias repairs the output. What happens to its gradient then?",
        "reduce_from_ranks(linear(x, weight)) is the sum. The bias belongs behind it, once.",
    ),
)
