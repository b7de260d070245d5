"""Exercises of "PP basic": what crosses two cuts, a message that says its own shape, a buffer that is never filled.

Chapter: book/pp/pp-basic.  Bytes and messages come from the ledger, gradients are compared with one process in float64.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, check_found
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.pp import gradients
from dualpipe_course.start.ranks import SENDS, all_waited_for, check_messages_only
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

HEADER_BYTES = 128  # what a header may take: a rank, a type and a few sizes
SHAPES: tuple[tuple[tuple[int, ...], str], ...] = (
    ((3, 4), "float64"),
    ((5,), "float32"),
    ((), "float64"),
    ((200, 1, 3), "bfloat16"),
    ((2, 2, 1, 2, 2), "int64"),
    ((70_000,), "bool"),
    ((0, 4), "float32"),
)


def _make(shape: tuple[int, ...], dtype: str) -> "Tensor":
    """A tensor that is not contiguous where that is possible, of numbers that need all the digits of their type."""
    import torch

    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape[::-1])
    values = {"bool": numbers % 3 == 0, "int64": 2**53 + numbers, "bfloat16": numbers % 200}.get(dtype, numbers / 3.0)
    if dtype == "float64":
        values = numbers.double() / 3
    return values.to(getattr(torch, dtype)).permute(tuple(range(len(shape)))[::-1])


def _size(shape: tuple[int, ...], dtype: str) -> int:
    tensor = _make(shape, dtype)
    return int(tensor.numel() * tensor.element_size())


def _relay(rank: int, world_size: int, send: Callable[..., Any], recv: Callable[..., Any], number: int) -> str | None:
    """Rank 0 sends, rank 1 passes on; say what is wrong with what arrived, if anything."""
    import torch

    expected = _make(*SHAPES[number])
    if rank == 0:
        send(expected, 1)
        all_waited_for()
        return None
    found = recv(rank - 1)
    if rank < world_size - 1:
        send(found, rank + 1)
    all_waited_for()
    if not isinstance(found, torch.Tensor):
        return f"returned {type(found).__name__} instead of a tensor"
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"got a {str(found.dtype).removeprefix('torch.')} tensor of shape {tuple(found.shape)}"
    if torch.equal(found, expected):
        return None
    place = (found != expected).flatten().tolist().index(True)
    ours, theirs = (tensor.flatten()[place].item() for tensor in (found, expected))
    return f"got another element {place}: {ours!r} instead of {theirs!r}"


def _one_batch(rank: int, world_size: int, fn: Callable[..., Any]) -> Found:
    import torch

    stage, (inputs, targets) = gradients.make_stage(rank), gradients.make_batch([gradients.ROWS])
    torch.manual_seed(100 + rank)
    x, target = inputs[0] if rank == 0 else None, targets[0] if rank == world_size - 1 else None
    gradients.leave_gradients(stage)
    fn(rank, world_size, stage, x, target, torch.empty_like(inputs[0]))
    all_waited_for()
    weight, bias, *_ = gradients.added_to(stage)
    return gradients.found_in(stage)._replace(costs={"worked on zeros": any(bias) and not any(weight)})


def _judge_any_shape(send_tensor: Callable[..., Any], recv_tensor: Callable[..., Any]) -> str:
    for number, (shape, dtype) in enumerate(SHAPES):
        case = f"a {dtype} tensor of shape {shape}"
        results = on_ranks(_relay, 3, send_tensor, recv_tensor, number, case=case)
        check_messages_only(results, case)
        for rank in (1, 2):
            if (problem := results[rank]) is not None:
                raise Wrong(f"{case}: rank {rank} {problem}")
        messages = sum(results.ledger.count(name, 0) for name in SENDS)
        if messages > 2:
            raise Wrong(f"{case}: {messages} messages; a header and the tensor are enough")
        sent, size = sum(results.ledger.sent(name, 0) for name in SENDS), _size(shape, dtype)
        if sent > size + HEADER_BYTES:
            raise Wrong(f"{case}: {sent} bytes for {size} bytes of data; the header may take {HEADER_BYTES}")
    return f"{len(SHAPES)} shapes and types, two messages each, the header within {HEADER_BYTES} bytes"


def _judge_filled(fn: Callable[..., Any], num_ranks: int) -> None:
    case = f"{num_ranks} rank(s)"
    results = on_ranks(_one_batch, num_ranks, fn, case=case)
    for rank, found in enumerate(results):
        if found.costs["worked on zeros"]:
            raise Wrong(f"{case}: rank {rank} worked on zeros: its bias has a gradient, its first weight has none")
    check_found(results, case, partial(gradients.beside, num_ranks), gradients.in_words)
    check_messages_only(results, case)
    messages = sum(results.ledger.count(name) for name in SENDS)
    if messages != 2 * (num_ranks - 1):
        raise Wrong(f"{case}: {messages} messages, expected {2 * (num_ranks - 1)}: one down and one up per boundary")


crossing = Predict(
    "pp_basic-1",
    "Four numbers cross two cuts",
    ("first activation", "second activation", "second gradient", "first gradient"),
    lambda: (4, -4, -6, 6),
    minutes=5,
    points=1,
    trail=True,
    hints=(
        "Down: y0 = 2 x, y1 = -1 y0. The third stage does not send anything down.",
        "The error of the last stage is its prediction minus the target: 3 y1 - z.",
        "A stage sends up the gradient of its input: the gradient of its output times its own weight.",
    ),
    slips=(
        {},
        {},
        {
            8: "the gradient of the input is the gradient of the output times the weight, with its sign",
            -8: "this is the weight's own gradient; what crosses the cut is the gradient of the input",
            6: "the error is the prediction minus the target, and gradients are asked for in the order in which they "
            "travel, from the last stage",
        },
        {},
    ),
)

any_shape = Implement(
    "pp_basic-2",
    "A message that says its own shape",
    "Send tensors of any shape and type to a rank that knows neither.",
    judge=_judge_any_shape,
    minutes=25,
    points=3,
    hints=(
        "Two messages: a header of fixed size that the receiver can allocate blindly, then the tensor itself.",
        "Put the number of dimensions, an index of the type in TYPES, and the sizes into 8 int64 numbers.",
        "torch.empty(sizes, dtype=...) makes the buffer. A tensor without elements needs no second message; "
        "one that is not contiguous has to be made so before it is sent.",
    ),
)

filled = Repair(
    "pp_basic-3",
    "The buffer that is never filled",
    "Repair `pipeline_step(rank, world_size, stage, x, target, like)`, which sends zeros in both directions.",
    cases=((1,), (2,), (3,)),
    judge=_judge_filled,
    right="1 to 3 ranks, gradients equal those of one process, one message per boundary and direction",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Print the norm of what each rank receives.",
        "One buffer for all messages is a good idea only if the result is copied into it before each send.",
        "Both directions use the outbox: the activation on the way down, the gradient of the input on the way up.",
    ),
)
