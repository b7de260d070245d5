"""`generate`: write text with the model of a `Trainer`, one byte at a time, through the full pipeline.

Chapter: book/whole/training.  In: a beginning.  Out: the beginning and what the model adds.
Every byte is one forward of the last `sequence_length` bytes: no keys and values are kept, so n bytes cost n forwards.
The padding behind the text does no harm, because attention is causal.  The rank that holds the text's last position
gives its logits to all; every rank draws the same byte from them.
Elsewhere: vLLM and Megatron's `generate` keep keys and values.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.cp.sequence import shard
from dualpipe_lab.data import VOCABULARY_SIZE
from dualpipe_lab.world.context import device

if TYPE_CHECKING:
    from dualpipe_lab.train.trainer import Trainer


def generate(trainer: "Trainer", prompt: str | bytes, num_tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
    """Return a prompt continued by `num_tokens` bytes; every rank calls this, and gets the same text.

    Args:
        trainer: with the model.
        prompt: at least one byte.
        num_tokens: bytes to add.
        temperature: 0 takes the likeliest byte; above, bytes are drawn, at 1 with the model's probabilities.
        seed: of the draws.

    Raises:
        ValueError: an empty prompt, or a number below 0.
    """
    text = bytearray(prompt.encode() if isinstance(prompt, str) else prompt)
    if not text or num_tokens < 0 or temperature < 0:
        raise ValueError(
            f"a text is continued from at least 1 byte, by at least 0 tokens at a temperature of at least 0, got "
            f"{len(text)} bytes, num_tokens={num_tokens}, temperature={temperature}"
        )
    generator = torch.Generator().manual_seed(seed)
    with trainer.optimizer.gathered():
        for _ in range(num_tokens):
            logits = _next_logits(trainer, bytes(text[-trainer.options.sequence_length :]))
            text.append(_draw(logits, temperature, generator))
    return text.decode(errors="replace")


def _next_logits(trainer: "Trainer", text: bytes) -> Tensor:
    """Return `logits_V` of the byte that follows a text, on every rank."""
    length, last = trainer.options.sequence_length, len(text) - 1
    ids = torch.tensor([[*text, *[0] * (length - len(text))]], device=device())
    where = torch.arange(length, device=device())
    layout, here = trainer.layout, trainer.mesh
    if layout is not None:
        ids, where = shard(ids, layout, here.rank("cp")), shard(where, layout, here.rank("cp"), dim=0)
    outputs = trainer.outputs([ids] * trainer.plan.num_microbatches)  # the program has so many; they are all the same
    found = torch.zeros(trainer.config.vocabulary_size, dtype=torch.float64, device="cpu")
    position = (where == last).nonzero().flatten()
    if 0 in outputs and len(position) and trainer.data_rank == 0:
        local = outputs[0][0, int(position[0])].detach().double().cpu()
        stages = trainer.model.stages
        head = stages[max(stages)].head
        assert head is not None, "the last stage has made the outputs"
        first = head.shards["weight"].start  # of this rank of tp, in the vocabulary
        found[first : first + len(local)] = local
    comm.all_reduce(found)  # each entry comes from one rank
    return found


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    known = logits[:VOCABULARY_SIZE]  # a token is a byte
    if not temperature:
        return int(known.argmax())
    return int(torch.multinomial((known / temperature).softmax(0), 1, generator=generator))
