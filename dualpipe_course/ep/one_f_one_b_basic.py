"""Exercises of "1F1B basic": times and bytes of the serial order, and a router's gradient.

Chapter: book/ep/one-f-one-b-basic.  Gradients are judged against autograd on one process.
One expert per rank, every token at one expert, experts taken in turn: x_M = x + tanh(x W_A^T), w_M = sigmoid(x_M w_R),
y_M = tanh(x_M W_M^T), y = x_M + w_M y_M.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.comparison import Found, Numbers, Off, in_words
from dualpipe_course.declared import Predict, Repair

if TYPE_CHECKING:
    from torch import Tensor


NAMES = ("pair", "waiting", "split backward", "bytes")
_SLIPS = (
    {120: "that is the work; the ranks wait for the rows too", 148: "C and D travel in the backward too"},
    {24: "two all-to-alls forward and two back", 36: "there are four layers"},
    {
        104: "that is the serial backward: M_W and A_W can run while rows travel",
        80: "the first C_B has nothing to hide behind",
        86: "D_B of a layer hides behind its M_W",
    },
    {
        16384: "a rank's own quarter does not travel",
        6144: "each token goes to 2 experts; or is that one direction?",
        3072: "those are the bytes of one layer",
        768: "that is one all-to-all",
        24576: "float32 has 4 bytes",
    },
)
WIDTH = 3
CASES = ((1, 1), (1, 4), (2, 2), (2, 6), (4, 8))  # ranks, tokens of each
_WHERE = {
    "dW_M": "look at what travels to the expert, and at tanh'",
    "dw_R": "the weight w_M of a token multiplies y_M: what is its gradient, and on whose rows?",
    "dW_A": "x_M is used three times: by the residual, by the expert, by the router",
    "dx": "x is used twice: in x_M directly, and through tanh",
}


class Saved(NamedTuple):
    """What the forward keeps: T tokens of this rank, R rows at its expert, H features.

    Attributes:
        x, t, x_M: `_TH`: input, tanh(x W_A^T), their sum.
        w: `w_T`, the router's weight of each token's expert.
        y_M: `y_TH`, what came back, in the order of the tokens.
        inputs, h: `_RH`: what arrived at the expert, and tanh of its product.
        order, back: tokens by expert, and back into their own order.
    """

    x: "Tensor"
    t: "Tensor"
    x_M: "Tensor"  # noqa: N815 - the chapter's symbols
    w: "Tensor"
    y_M: "Tensor"  # noqa: N815
    inputs: "Tensor"
    h: "Tensor"
    order: "Tensor"
    back: "Tensor"


def _draw(num_ranks: int, tokens: int) -> tuple[list["Tensor"], "Tensor"]:
    import torch

    torch.manual_seed(17 * num_ranks + tokens)
    shapes = (WIDTH, WIDTH), (WIDTH,), (num_ranks, WIDTH, WIDTH)
    weights = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    return weights, torch.randn(num_ranks, 2, tokens, WIDTH, dtype=torch.float64)


def _backward(rank: int, world_size: int, fn: Callable[..., Any], tokens: int) -> Found:
    """The four gradients, those of common weights summed; how many exchanges it took, and how wide rows were."""
    import torch

    from dualpipe_lab import comm

    (w_a, w_r, experts), drawn = _draw(world_size, tokens)
    x, dy = drawn[rank]
    widths: list[int] = []

    def exchange(rows: "Tensor") -> "Tensor":
        widths.append(rows[0].numel())
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        comm.all_to_all_single(received, rows.contiguous())
        return received

    order = torch.arange(tokens).view(-1, world_size).T.flatten()
    back, t = order.argsort(), torch.tanh(x @ w_a.T)
    inputs = exchange((x + t)[order])
    h = torch.tanh(inputs @ experts[rank].T)
    saved = Saved(x, t, x + t, torch.sigmoid((x + t) @ w_r), exchange(h)[back], inputs, h, order, back)
    widths.clear()
    found = fn(w_a, w_r, experts[rank], saved, dy, exchange)
    if not isinstance(found, (tuple, list)) or len(found) != 4:
        return Found({}, refused="expected four tensors: dx, dW_A, dw_R, dW_M")
    if len(widths) != 2:
        return Found({}, refused=f"exchanged rows {len(widths)} times; C_B and D_B are 2")
    if max(widths) > WIDTH:
        return Found({}, refused=f"exchanged rows of {max(widths)} numbers; {WIDTH} will do")
    grads = dict(zip(("dx", "dW_A", "dw_R", "dW_M"), found, strict=True))
    for name, like in (("dW_A", w_a), ("dw_R", w_r)):
        if isinstance(grads[name], torch.Tensor) and grads[name].shape == like.shape:
            grads[name] = grads[name].clone(memory_format=torch.contiguous_format)
            comm.all_reduce(grads[name])
    return Found({name: Numbers.of(grad) for name, grad in grads.items()})


def _one_process(rank: int, num_ranks: int, tokens: int) -> "dict[str, Tensor | None]":
    """The gradients of a rank's tokens and expert, and of the common weights, in the order of the backward."""
    import torch

    (w_a, w_r, experts), drawn = _draw(num_ranks, tokens)
    leaves = [w.requires_grad_() for w in (w_a, w_r, experts)]
    dx = []
    for x, dy in drawn:
        x = x.clone().requires_grad_()
        x_m = x + torch.tanh(x @ w_a.T)
        y_m = torch.tanh(torch.einsum("ti,toi->to", x_m, experts[torch.arange(tokens) % num_ranks]))
        (x_m + torch.sigmoid(x_m @ w_r)[:, None] * y_m).backward(dy)
        dx.append(x.grad)
    d_a, d_r, d_m = (leaf.grad for leaf in leaves)
    return {"dW_M": None if d_m is None else d_m[rank], "dw_R": d_r, "dW_A": d_a, "dx": dx[rank]}


def _why_wrong(off: Off) -> str:
    return f"{in_words(off)}; {_WHERE[off.name]}"


numbers = Predict(
    "one_f_one_b_basic-1",
    "Four layers",
    NAMES,
    lambda work, travel, tokens: (24 * work + 16 * travel, 16 * travel, 16 * work + travel, 768 * tokens),
    "a piece of work takes {work} ticks, an all-to-all {travel}.",
    "A rank has {tokens} tokens",
    minutes=10,
    points=1,
    hints=(
        "Forward: 2 pieces of work and 2 all-to-alls per layer. Backward: 4 and 2.",
        "If M_W runs while D_B travels and A_W while the next C_B does, one all-to-all is left: which?",
        "One all-to-all of a rank: 3 of 4 parts of 16 * 2 rows of 8 numbers of 4 bytes. How many per layer?",
    ),
    slips=_SLIPS,
    work=(5, 6, 7, 8),
    travel=(3, 2, 4),
    tokens=(16, 8, 24, 32),
    called={"travel": "all-to-all"},
)


router = Repair(
    "one_f_one_b_basic-3",
    "A router that learns from others",
    "Repair a backward whose router gets a wrong gradient.",
    cases=CASES,
    run=_backward,
    reference=_one_process,
    why=_why_wrong,
    named="{} rank(s), {} tokens each",
    right=f"all gradients equal autograd's on one process in {len(CASES)} cases",
    minutes=10,
    points=2,
    hints=(
        "dW_M is right, so what travels is right. What does the router need of it?",
        "y = x_M + w_M y_M. Differentiate by w_M: does w_M itself occur in the result?",
        "y_M is in the order of the tokens. In which order is `rows`?",
    ),
)
