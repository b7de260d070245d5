"""Exercises of "Column-parallel": what four ranks hold and send, the layer itself, a layer below that drifts apart.

Chapter: book/tp/column-parallel.  Outputs and gradients are judged against one process, messages by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Limit
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.switched_off import Without
from dualpipe_course.tp import layers
from dualpipe_course.variants import Known

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("numbers held", "bytes forward", "bytes backward", "bytes gathered")
# ranks, shape of x, outputs: on 4 ranks 6 outputs are cut into 2 2 2 0
SIZES = (
    (1, (3, 2), 2), (2, (1, 2), 2), (2, (3, 2), 4), (2, (2, 3, 4), 5),
    (3, (5, 3), 3), (4, (3, 4), 6), (4, (2, 3, 4), 8),
)  # fmt: skip
_TWO_SUMS = "a rank sent {found} messages in the backward; dx and dz, side by side, are summed with {most}"
_TOO_EARLY = {
    "dscale": ". dx is right, so f stands too early: scale is used before it",
    "dweight": ". Every rank has other rows: their gradients belong to this rank alone",
}
_BEHIND = (
    "f stands behind the product, where every rank has other outputs, and sums their dy; "
    "it belongs before the product, on what all ranks hold alike"
)


def _slips(h: int, f: int, tokens: int) -> Known:
    return (
        (
            (f / 4 * h, "that is the weight alone; a rank has the bias of its own outputs too"),
            (f / 4 * h + f, "that counts the whole bias; a rank adds those of its own outputs"),
            (f * (h + 1), "that is the whole layer; the rows are dealt out to four ranks"),
            (h / 4 * (f + 1), f"cut the outputs, not the inputs: {f} / 4 rows of {h}"),
        ),
        (
            (3 * tokens * f, "that is the all-gather of y, which this layer leaves out"),
            (6 * tokens * h, "the sum of dx is a matter of the backward"),
            (6 * tokens * f, "y_r is a slice of y, not a partial sum: there is nothing to sum"),
        ),
        (
            (6 * tokens * f, f"that sums dy; dx has {h} numbers for each token, whatever the outputs are"),
            (4 * tokens * h, "those are the bytes of dx; an all-reduce sends 2 (t - 1) / t of them"),
            (3 * tokens * h, "that is the reduce-scatter alone; an all-gather of the finished sums follows"),
            (1.5 * tokens * h, "count bytes; a float32 has 4 of them"),
            (0, "dx is a sum over all outputs, and each rank has a quarter of them"),
        ),
        (
            (4 * tokens * f, "those are the bytes of y; a rank's own quarter does not travel to it"),
            (6 * tokens * f, "an all-gather is half of an all-reduce"),
            (0.75 * tokens * f, "count bytes; a float32 has 4 of them"),
            (3 * tokens * h, f"that gathers x; the outputs are {f} for each token"),
        ),
    )


def _two_inputs(x: "Tensor", z: "Tensor", weight: "Tensor", other: "Tensor", bias: "Tensor") -> "Tensor":
    return x @ weight.t() + z @ other.t() + bias


def _scaled(x: "Tensor", scale: "Tensor", weight: "Tensor") -> "Tensor":
    return (x * scale) @ weight.t()


def _judge_layer(fn: Callable[..., Any], num_ranks: Any, shape: Any, outputs: Any) -> None:
    z_shape = (*shape[:-1], shape[-1] + 1)
    shapes = {"x": shape, "z": z_shape, "weight": (outputs, shape[-1]), "other": (outputs, z_shape[-1])}
    cuts = {"x": None, "z": None, "weight": 0, "other": 0, "bias": 0}
    case = layers.Case(num_ranks, shapes | {"bias": (outputs,)}, cuts, (*shape[:-1], outputs), out_cut=-1)
    size = layers.num_bytes(shape) + layers.num_bytes(z_shape)
    layers.check_layer(
        Without(fn, *layers.LIBRARY),
        _two_inputs,
        case,
        backward=size,
        because="Only dx and dz are summed, once.",
        limits=[Limit("backward messages", 2 * (num_ranks - 1), _TWO_SUMS, scope="largest")],
    )


def _judge_scaled(fn: Callable[..., Any], num_ranks: Any, shape: Any, outputs: Any) -> None:
    shapes = {"x": shape, "scale": shape[-1:], "weight": (outputs, shape[-1])}
    case = layers.Case(num_ranks, shapes, {"x": None, "scale": None, "weight": 0}, (*shape[:-1], outputs), out_cut=-1)
    why = "One sum is enough: behind it, dx and dscale are the same on all ranks."
    size = layers.num_bytes(shape)
    layers.check_layer(fn, _scaled, case, backward=size, because=why, hints=_TOO_EARLY, behind=_BEHIND)


numbers = Predict(
    "column_parallel-1",
    "What a column holds and sends",
    NAMES,
    lambda h, f, tokens: (f / 4 * (h + 1), 0, 6 * tokens * h, 3 * tokens * f),
    "with {h} inputs, {f} outputs",
    "It gets {tokens} tokens",
    minutes=5,
    points=1,
    trail=True,
    hints=(
        "Each rank has 3 of the 12 outputs: 3 rows of the weight, 3 elements of the bias.",
        "The only message of the layer sums dx: 6 tokens of 8 numbers. An all-reduce sends 2 (t - 1) / t of its bytes.",
        "Gathering y moves 6 tokens of 12 numbers; each rank sends (t - 1) / t of those bytes.",
    ),
    slips=_slips,
    h=(8, 6, 10, 16),
    f=(12, 8, 16, 20, 24),
    tokens=(6, 5, 8, 10),
    called={"h": "inputs", "f": "outputs"},
)

layer = Implement(
    "column_parallel-2",
    "Two inputs, one message",
    "Write `column_linear(x, z, weight, other, bias)`: this rank's outputs of two inputs, one message backward.",
    cases=SIZES,
    judge=_judge_layer,
    right=f"outputs and gradients equal one process in {len(SIZES)} cases, a rank without outputs included; "
    "one message",
    minutes=15,
    points=3,
    hints=(
        "The forward is a linear with this rank's rows for each input. Only dx and dz need a message.",
        "Give the two products what CopyBoth.apply(x, z) returns. Its backward gets this rank's partial sums of both.",
        "One flat tensor, torch.cat([dx.flatten(), dz.flatten()]), one comm.all_reduce, and split it again.",
    ),
)

scaled = Repair(
    "column_parallel-3",
    "Two ranks, two scales",
    "Repair a layer whose replicated scale gets another gradient on every rank.",
    cases=SIZES,
    judge=_judge_scaled,
    right=f"all gradients equal one process in {len(SIZES)} cases, with a single sum",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "The outputs are right. Compare dx and dscale on two ranks: what does the sum over the ranks give?",
        "copy_to_ranks belongs where a tensor that all ranks hold alike is first used by each in its own way.",
        "x and scale are multiplied by all ranks alike. The product with this rank's rows is what differs.",
    ),
)
