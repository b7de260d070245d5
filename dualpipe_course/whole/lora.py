"""Exercises of "Frozen weights and LoRA": bytes of a fine-tuning.

Chapter: book/whole/lora.  Gradients are judged against one process, messages by the ledger.
"""

from typing import TYPE_CHECKING

from dualpipe_course.declared import Predict
from dualpipe_course.variants import Known

if TYPE_CHECKING:
    pass

NAMES = ("MB under ZeRO-1", "MB under ZeRO-3", "MB of gradients sent", "MB gathered")


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
