"""Exercises of "PP basic": the part `messages`, a buffer that is never filled.

Chapter: book/pp/pp-basic.  Bytes and messages come from the ledger, gradients are compared with one process in float64.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, check_found
from dualpipe_course.declared import Repair
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.pp import gradients
from dualpipe_course.start.ranks import SENDS, all_waited_for, check_messages_only
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

HEADER_BYTES = 128  # what a header may take: a number of dimensions, a type and at most eight sizes
SHAPES: tuple[tuple[tuple[int, ...], str], ...] = (
    ((5,), "float32"),
    ((), "float64"),
    ((0, 4), "float32"),
    ((3, 4), "float64"),
    ((200, 1, 3), "bfloat16"),
    ((2, 2, 1, 2, 2), "int64"),
    ((70_000,), "bool"),
    ((1, 2, 1, 1, 2, 1, 2, 1), "float16"),
    ((2, 0, 3), "int32"),
)
LARGE = 300_000  # numbers that no transport takes before a receive is there
ORDERS = ("the second one first", "both ways at once", "two with one tag, in turn")


def _make(shape: tuple[int, ...], dtype: str) -> "Tensor":
    """A tensor that is not contiguous where that is possible, of numbers that need all the digits of their type."""
    import torch

    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape[::-1])
    known = {"bool": numbers % 3 == 0, "int64": 2**53 + numbers, "bfloat16": numbers % 200, "int32": 2**30 + numbers}
    values = known.get(dtype, numbers / 3.0)
    if dtype == "float64":
        values = numbers.double() / 3
    return values.to(getattr(torch, dtype)).permute(tuple(range(len(shape)))[::-1])


def _wrong_with(found: Any, expected: "Tensor") -> str:
    """Say what is wrong with what arrived; an empty string if nothing is."""
    import torch

    if not isinstance(found, torch.Tensor):
        return f"recv_tensor returned {type(found).__name__} instead of a tensor"
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"got a {str(found.dtype).removeprefix('torch.')} tensor of shape {tuple(found.shape)}"
    if found.requires_grad:
        return "what arrives needs no gradient yet: a stage asks for it, on a leaf of its own"
    if torch.equal(found, expected):
        return ""
    if not found.any():
        return "got zeros alone: has the message arrived in another tensor than the one that is returned?"
    place = (found != expected).flatten().tolist().index(True)
    ours, theirs = (tensor.flatten()[place].item() for tensor in (found, expected))
    return f"got another element {place}: {ours!r} instead of {theirs!r}"


def _check_works(works: Any) -> list[Any]:
    if not isinstance(works, list | tuple) or not all(hasattr(work, "wait") for work in works):
        raise TypeError(
            f"send_tensor returned {type(works).__name__}; return the list of the sends that it has started"
        )
    return list(works)


def _relay(rank: int, world_size: int, shape: tuple[int, ...], dtype: str) -> Found:
    """Rank 0 sends, rank 1 passes on to rank 2."""
    from mine.messages import recv_tensor, send_tensor

    expected, problem, sent, messages = _make(shape, dtype), "", 0, 0
    if rank > 0:
        found = recv_tensor(rank - 1, 3)
        problem = _wrong_with(found, expected)
    if rank < world_size - 1:
        x = found if rank > 0 and not problem else expected.requires_grad_(expected.is_floating_point())
        meter = Meter()
        for work in _check_works(send_tensor(x, rank + 1, 3)):
            work.wait()
        spent = meter.lap()
        sent, messages = spent.bytes, spent.messages
    all_waited_for()
    return Found({}, costs={"sent": sent, "messages": messages}, refused=problem)


def _cost(world_size: int, shape: tuple[int, ...], dtype: str) -> list[Limit]:
    x = _make(shape, dtype)
    size = x.numel() * x.element_size()
    words = f"rank {{rank}} sent {{found}} bytes for {size} bytes of data; the header may take {HEADER_BYTES}"
    return [
        Limit("messages", 2, "rank {rank} sent {found} messages; a header and the tensor are enough", scope="each"),
        Limit("sent", size + HEADER_BYTES, words, scope="each"),
    ]


def _in_any_order(rank: int, world_size: int, order: str) -> Found:
    """Two tensors between two ranks."""
    import torch
    from mine.messages import recv_tensor, send_tensor

    whole = [torch.arange(number, LARGE + number, dtype=torch.float64) for number in range(4)]
    first, second = whole[2 * rank][: LARGE // 2], whole[2 * rank + 1].view(2, -1)
    theirs = [whole[2 * (1 - rank)][: LARGE // 2], whole[2 * (1 - rank) + 1].view(2, -1)]
    works, found = [], []
    tags = (0, 0) if order == ORDERS[2] else (7, 5)
    if rank == 0 or order == ORDERS[1]:
        works = _check_works(send_tensor(first, 1 - rank, tags[0])) + _check_works(
            send_tensor(second, 1 - rank, tags[1])
        )
    if rank == 1 or order == ORDERS[1]:
        turns = (1, 0) if order == ORDERS[0] else (0, 1)
        found = [(turn, recv_tensor(1 - rank, tags[turn])) for turn in turns]
    for work in works:
        work.wait()
    all_waited_for()
    problems = [problem for turn, x in found if (problem := _wrong_with(x, theirs[turn]))]
    return Found({}, refused=problems[0] if problems else "")


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


messages = Part(
    "pp_basic-4",
    "messages",
    "A tensor that says its own shape",
    "Write send_tensor and recv_tensor for a receiver that knows neither shape nor type.",
    names=("send_tensor", "recv_tensor"),
    trials=(
        OnRanks(_relay, tuple((3, *case) for case in SHAPES), None, "{0} ranks, a {2} tensor of shape {1}", _cost),
        OnRanks(_in_any_order, tuple((2, order) for order in ORDERS), None, "two large tensors, {1}"),
    ),
    right=f"{len(SHAPES)} shapes and types, two messages each, and {len(ORDERS)} orders",
    minutes=35,
    points=3,
    hints=(
        "Two messages with one tag: a header of fixed size that the receiver can allocate blindly, then the tensor "
        "itself. Use isend, so that nobody waits in send_tensor.",
        "The header: the index of the type in a list of types, the number of dimensions, and the sizes, filled up with "
        "zeros to ten int64 numbers. A tensor without elements needs no second message.",
        "x = x.detach().contiguous(); works = [isend(torch.tensor(header), dst, tag)]. The receiver: irecv(header, "
        "src, tag).wait(); number, dim, *shape = header.tolist(); x = torch.empty(shape[:dim], dtype=TYPES[number]).",
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
