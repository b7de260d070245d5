"""Exercises of "Pipelines that are not a line": negatives and bytes, and yes or no.

Chapter: book/pp/two-towers.  Gradients are judged against one process in float64, messages by the ledger.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course.comparison import Found, Limit, Numbers, Unchanged, compare_on_ranks
from dualpipe_course.declared import Implement, Predict
from dualpipe_course.switched_off import AUTOGRAD, Without

NAMES = ("negatives", "bytes gathered", "bytes of two matrices", "negatives of 8 microbatches", "bytes sent back")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        127: "the other 7 ranks' pairs are negatives too",
        1024: "one of these is the image's own caption",
        4095: "only the pairs of one microbatch meet, 128 on each rank",
    },
    {
        262_144: "a rank sends its own features to each of 7 others",
        2_097_152: "a rank's own part does not travel: 7/8 of the whole does",
        917_504: "features of images and of texts are gathered: 2 d numbers per pair",
        7_340_032: "gathered are the pairs of one microbatch",
    },
    {
        524_288: "there are two matrices, one for images and one for texts",
        8_388_608: "a rank has the rows of its own 128 pairs, not of all 1,024",
        131_072: "the columns are the pairs of all 8 ranks",
        2_097_152: "a number in float32 has 4 bytes",
    },
    {
        1023: "a microbatch has 64 pairs per rank now",
        2047: "more microbatches of the same batch are smaller ones",
        512: "one of these is the image's own caption",
    },
    {
        1_393_664: "integers have no gradient",
        1_261_568: "`image` rides along, and its gradient has to come back to its tower",
        131_072: "the gradient of x comes back, too",
    },
)
WIDTH, NUMBER = 3, 8  # features of the second exercise, bytes of a float64
LIBRARY = ("dualpipe_lab.models.contrastive:contrastive_loss", "dualpipe_lab.models.contrastive:_Contrastive")


_BYTES = "the ranks sent {found:,} bytes; a gather of the texts, its way back and one number of each rank need {most:,}"


def _pairwise(rank: int, world_size: int, fn: Callable[..., Any], num_pairs: int) -> Found:
    import torch
    from torch.nn.functional import logsigmoid

    generator = torch.Generator().manual_seed(num_pairs)
    both = torch.randn(2, world_size * num_pairs, WIDTH, generator=generator, dtype=torch.float64)
    a, c = torch.nn.functional.normalize(both, dim=-1)
    whole = [value.clone().requires_grad_() for value in (a, c, torch.tensor(3.0, dtype=a.dtype))]
    signs = 2 * torch.eye(len(a), dtype=a.dtype) - 1
    loss = -logsigmoid(signs * whole[2] * (whole[0] @ whole[1].t())).sum() / len(a)
    d_a, d_c, d_scale = torch.autograd.grad(loss, whole)  # before the answer, for which autograd is switched off
    own = slice(rank * num_pairs, (rank + 1) * num_pairs)
    expected = {"da": d_a[own], "dc": d_c[own], "dscale": d_scale.reshape(1)}
    given = [a[own].clone(), c[own].clone(), whole[2].detach().clone()]
    unchanged = Unchanged(a=given[0], c=given[1], scale=given[2])
    found = fn(*given)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise TypeError("return three tensors: the gradients of a, c and scale")
    return Found(
        {name: Numbers.of(_tensor(value, name)) for name, value in zip(expected, found, strict=True)},
        {name: Numbers.of(value) for name, value in expected.items()},
        changed="" if unchanged.first() is None else f"the argument {unchanged.first()} has changed; work on a copy",
    )


def _tensor(value: Any, name: str) -> Any:
    """The gradient as a tensor; that of the scale in one form."""
    import torch

    value = torch.as_tensor(value, dtype=torch.float64)
    return value.reshape(1) if name == "dscale" and value.numel() == 1 else value


def _judge_pairwise(fn: Callable[..., Any], num_ranks: int, num_pairs: int) -> None:
    case = f"{num_pairs} pair(s) on each of {num_ranks} rank(s)"
    everyone = num_ranks * num_pairs * WIDTH * NUMBER
    most = (num_ranks - 1) * (2 * everyone + 2 * NUMBER)
    answer = Without(fn, *LIBRARY, *AUTOGRAD)
    compare_on_ranks(
        _pairwise,
        num_ranks,
        answer,
        num_pairs,
        case=case,
        limits=[Limit("bytes", most, _BYTES)],
        at=", rank {rank}: ",
    )


numbers = Predict(
    "two_towers-1",
    "Negatives and bytes",
    NAMES,
    lambda d, width: (1023, 7168 * d, 2**20, 511, 128 * (77 * 2 * width + 4 * d)),
    "Features have {d} numbers",
    "bf16 of shape (128, 77, {width})",
    "float32 of shape (128, {d})",
    minutes=8,
    points=1,
    hints=(
        "A rank's 512 pairs of a step come in 4 microbatches. The loss sees the pairs of one microbatch on all ranks.",
        "An all-gather sends (N - 1) / N of the whole result from each rank. A pair has 2 d numbers.",
        "The gradient of every tensor that can have one comes back, also of those that the stage passes on.",
    ),
    slips=_SLIPS,
    d=(256, 64, 128, 384, 512),
    width=(64, 32, 48, 96, 128),
    called={"d": "numbers"},
)

pairwise = Implement(
    "two_towers-2",
    "Yes or no",
    "Write `gradients(a, c, scale)` of a loss that asks each pair a question of its own, by hand.",
    cases=((1, 2), (1, 3), (2, 2), (2, 5), (4, 1), (4, 4)),
    judge=_judge_pairwise,
    right="gradients of features and scale equal one process on 1 to 4 ranks; one gather, one way back",
    minutes=25,
    points=4,
    hints=(
        "Gather the texts only: products = a @ all_c.T, and signs = -1 but for +1 at this rank's own pairs.",
        "d loss / d logits = -signs * sigmoid(-signs * logits) / b, and all three gradients follow from it.",
        "The rows of texts go back with a reduce-scatter. The loss asked for is the mean over the ranks: divide by N "
        "once. The gradient of the scale is a sum over the ranks, too.",
    ),
)
