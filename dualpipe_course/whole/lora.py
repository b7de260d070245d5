"""Exercises of "Frozen weights and LoRA": bytes of a fine-tuning, and the backward of two adapters with one message.

Chapter: book/whole/lora.  Gradients are judged against one process, messages by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Unchanged
from dualpipe_course.declared import Implement, Predict
from dualpipe_course.tp import layers
from dualpipe_course.variants import Known

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("MB under ZeRO-1", "MB under ZeRO-3", "MB of gradients sent", "MB gathered")
# ranks, tokens, inputs, width, outputs: on 4 ranks 3 outputs are cut into 0 1 1 1
CASES = ((1, 2, 3, 2, 2), (2, 3, 4, 2, 4), (2, 5, 6, 1, 2), (4, 6, 8, 3, 8), (4, 2, 3, 2, 3))
SCALE = 0.5
GRADIENTS = ("dx", "dA1", "dB1", "dA2", "dB2")


def _closed_form(model: int, thin: int, gpus: int) -> tuple[float, float, float, float]:
    frozen, most = 1000 * model, (gpus - 1) / gpus
    return (
        2 * frozen + 4 * thin + 12 * thin / gpus,
        (2 * frozen + 16 * thin) / gpus,
        most * 2 * thin,
        2 * most * 2 * (frozen + thin),
    )


def _slips(model: int, thin: int, gpus: int) -> Known:
    frozen, most = 1000 * model, (gpus - 1) / gpus
    return (
        (
            (2 * frozen + 16 * thin, "ZeRO-1 shards masters and moments, 12 of the 16 bytes of a trained parameter"),
            (2 * frozen + 2 * thin + 14 * thin / gpus, "that is ZeRO-2; ZeRO-1 keeps the adapters' gradients in full"),
            (4 * frozen + 4 * thin + 12 * thin / gpus, "frozen weights have no gradient"),
            (2 * frozen / gpus + 4 * thin + 12 * thin / gpus, "ZeRO-1 does not shard weights, frozen or not"),
            (4 * thin + 12 * thin / gpus, "the frozen weights are in memory too, 2 bytes each"),
        ),
        (
            (2 * frozen + 16 * thin / gpus, "ZeRO-3 shards all weights, the frozen ones too"),
            (
                16 * (frozen + thin) / gpus,
                "16 bytes are for trained parameters; a frozen one has its 2 of weight alone",
            ),
            (2 * frozen / gpus + 16 * thin, "ZeRO-3 shards the adapters and their states as well"),
        ),
        (
            (2 * thin, "(N - 1) / N: a GPU's own shard is not sent"),
            (2 * most * 2 * thin, "an all-reduce; ZeRO-1 reduce-scatters gradients, half of it"),
            (most * 2 * frozen, "frozen weights have no gradients to send"),
            (most * 2 * (frozen + thin), "frozen weights have no gradients to send"),
        ),
        (
            (most * 2 * (frozen + thin), "a layer is gathered in the forward and again in the backward, for dx"),
            (2 * most * 2 * thin, "frozen weights are sharded as well, and a layer needs them in full"),
            (
                3 * most * 2 * (frozen + thin),
                "the third message of ZeRO-3 has gradients; the question is what is gathered",
            ),
            (2 * most * 2 * frozen, "the adapters are sharded and gathered too"),
            (2 * 2 * (frozen + thin), "(N - 1) / N: a GPU's own shard is not sent"),
        ),
    )


def _limits(num_ranks: int, tokens: int, _inputs: int, width: int, _outputs: int) -> list[Limit]:
    needed = 2 * (num_ranks - 1) * 2 * 8 * tokens * width
    wide = "the ranks sent {found:,} bytes in all, {most:,} are needed: sum du, R numbers per token, before A and x"
    often = "a rank sent {found} messages; one carries both du, side by side"
    return [
        Limit("bytes", needed, wide, needed),
        *([Limit("calls", 1, often, scope="largest")] if num_ranks > 1 else []),
    ]


def _gradients(
    rank: int, world_size: int, fn: Callable[..., Any], tokens: int, inputs: int, width: int, outputs: int
) -> Found:
    import torch

    shapes = {"x": (tokens, inputs)}
    for one in "12":
        shapes |= {f"A{one}": (width, inputs), f"B{one}": (outputs, width), f"dy{one}": (tokens, outputs)}
    full = {name: layers.draw(name, shape) for name, shape in shapes.items()}
    expected = _expected(full)
    rows = [slice(owner * outputs // world_size, (owner + 1) * outputs // world_size) for owner in range(world_size)]
    given = {
        name: tensor[rows[rank]] if name[0] == "B" else tensor[:, rows[rank]] if name[0] == "d" else tensor
        for name, tensor in full.items()
    }
    given = {name: tensor.clone() for name, tensor in given.items()}
    unchanged = Unchanged(**given)
    order = ("x", "A1", "B1", "A2", "B2", "dy1", "dy2")
    found = fn(*(given[name] for name in order), SCALE)
    if (
        not isinstance(found, (tuple, list))
        or len(found) != 5
        or not all(isinstance(one, torch.Tensor) for one in found)
    ):
        return Found({}, refused=f"return five tensors: {', '.join(GRADIENTS)}")
    local = {name: grad[rows[rank]] if name[1] == "B" else grad for name, grad in expected.items()}
    slips = {
        name: {
            "the scale s is missing": Numbers.of(grad / SCALE),
            "the scale s is in it twice": Numbers.of(grad * SCALE),
        }
        for name, grad in local.items()
    }
    for name in ("dB1", "dB2"):
        summed = sum(expected[name][own] for own in rows)
        slips[name]["summed over the ranks, whose rows of B differ; a rank's rows need its own dy alone"] = Numbers.of(
            summed
        )
    written = unchanged.first()
    changed = f"the argument {written} has changed; work on a copy" if written else ""
    values = {name: Numbers.of(grad) for name, grad in zip(GRADIENTS, found, strict=True)}
    return Found(values, {name: Numbers.of(grad) for name, grad in local.items()}, slips, changed=changed)


def _expected(full: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Autograd's gradients of the full adapters."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in full.items() if name[0] != "d"}
    x = leaves["x"]
    total = sum((SCALE * x @ (leaves[f"B{one}"] @ leaves[f"A{one}"]).t() * full[f"dy{one}"]).sum() for one in "12")
    total.backward()
    return {name: leaves[name[1:]].grad for name in GRADIENTS}


numbers = Predict(
    "lora-1",
    "What a fine-tuning holds and sends",
    NAMES,
    _closed_form,
    "A model of {model} billion parameters",
    "{thin} million parameters of adapters",
    "on {gpus} GPUs",
    minutes=8,
    points=1,
    hints=(
        "A frozen parameter has 2 bytes of weight. A trained one has 2 of weight, 2 of gradient and 12 of state.",
        "ZeRO-1 shards the 12 bytes alone, ZeRO-3 everything.",
        "A reduce-scatter and an all-gather send (N - 1) / N of the bytes. ZeRO-3 gathers each layer twice.",
    ),
    slips=_slips,
    model=(8, 16, 24, 32, 48, 64),
    thin=(40, 80, 120, 160, 240),
    gpus=(4, 8, 16),
    called={"model": "billion parameters", "thin": "million of adapters", "gpus": "GPUs"},
)

backward = Implement(
    "lora-2",
    "Two adapters, one message",
    "Write `backward(x, A1, B1, A2, B2, dy1, dy2, s)` of two adapters beside column-parallel layers.",
    cases=CASES,
    run=_gradients,
    limits=_limits,
    right=f"all gradients equal one process in {len(CASES)} cases, with one message of both du",
    named="{} rank(s), {} tokens, {} inputs, width {}, {} outputs each",
    without=(*layers.LIBRARY, "dualpipe_lab.models.lora"),
    minutes=20,
    points=3,
    hints=(
        "First the backward of one adapter: du = s dy B, dB = s dy^T u, dA = du^T x, and dx is a sum of two du A.",
        "A rank has its rows of B alone, so s dy B is its partial sum of du. dB of these rows needs no other rank.",
        "torch.cat([du1, du2], 1), one comm.all_reduce, and split it again: R numbers per token and adapter.",
    ),
)
