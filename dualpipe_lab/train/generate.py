"""`generate`: write text with a trained model, one byte at a time: from a checkpoint alone, or inside of a `Trainer`.

Chapter: book/whole/training.  In: a beginning.  Out: the beginning and what the model adds.
Every byte is one forward of the last `sequence_length` bytes: no keys and values are kept, so n bytes cost n forwards.
  a checkpoint   one process, without ranks and plan: the full model in plain torch
  a trainer      the full pipeline; the padding behind the text does no harm, because attention is causal.  The rank
                 that holds the text's last position gives its logits to all; every rank draws the same byte from them
Elsewhere: vLLM and Megatron's `generate` keep keys and values.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.data import VOCABULARY_SIZE
from dualpipe_lab.dp.checkpoint.reader import Checkpoint
from dualpipe_lab.launch.context import device
from dualpipe_lab.train.options import find_checkpoint
from dualpipe_lab.train.sampler import check_vocabulary
from dualpipe_lab.train.saved_model import read_model

if TYPE_CHECKING:
    from dualpipe_lab.train.trainer import Trainer


def generate(
    source: "Trainer | str | Path",
    prompt: str | bytes,
    num_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    sequence_length: int | None = None,
) -> str:
    """Return a prompt continued by `num_tokens` bytes.

    Args:
        source: a checkpoint, or a folder of them, of which the last is taken: `result.checkpoint` after a run; inside
            of a rank, a trainer: then every rank calls this, and gets the same text.
        prompt: at least one byte.
        num_tokens: bytes to add.
        temperature: 0 takes the likeliest byte; above, bytes are drawn, at 1 with the model's probabilities.
        seed: of the draws.
        sequence_length: the bytes that the model reads (default: as it was trained).

    Raises:
        ValueError: an empty prompt, a number that has no meaning, weights without a known sequence length, or logits
            that are NaN.
        CheckpointError: as `read_model`.
    """
    text = bytearray(prompt.encode() if isinstance(prompt, str) else prompt)
    if not text or num_tokens < 0 or temperature < 0:
        raise ValueError(
            f"a text is continued from at least 1 byte, by at least 0 tokens at a temperature of at least 0, got "
            f"{len(text)} bytes, num_tokens={num_tokens}, temperature={temperature}"
        )
    if sequence_length is not None and sequence_length < 1:
        raise ValueError(f"sequence_length counts from 1, got {sequence_length}")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(source, str | Path):
        next_logits, length = _from_checkpoint(source, sequence_length)
        weights: AbstractContextManager[object] = nullcontext()
    elif sequence_length is not None:
        raise ValueError("a trainer has its sequence_length; leave it out")
    else:
        next_logits, length = partial(_next_logits, source), source.options.sequence_length
        weights = source.optimizer.gathered()
    with weights:
        for _ in range(num_tokens):
            known = next_logits(bytes(text[-length:]))[:VOCABULARY_SIZE]  # a token is a byte
            if known.isnan().any():
                raise ValueError("the model has diverged: logits are NaN, and no text follows; use a smaller lr")
            drawn = torch.multinomial((known / temperature).softmax(0), 1, generator=generator) if temperature else None
            text.append(int(known.argmax() if drawn is None else drawn))
    return text.decode(errors="replace")


def _from_checkpoint(path: Path | str, sequence_length: int | None) -> tuple[Callable[[bytes], Tensor], int]:
    """Return a function from a text to the logits of the next byte, and how many bytes the model reads."""
    found = find_checkpoint(path)  # once: a training that goes on may save a later one meanwhile
    sampler = Checkpoint(found).index.values["sampler"]
    length = sequence_length or (sampler["sequence_length"] if isinstance(sampler, Mapping) else None)
    if length is None:
        raise ValueError(f"{found} does not say how long its sequences were; give sequence_length=")
    model = read_model(found)
    check_vocabulary(model.config.vocabulary_size)

    def next_logits(text: bytes) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([list(text)], device=device()))
        return logits[0, -1].double().cpu()

    return next_logits, length


def _next_logits(trainer: "Trainer", text: bytes) -> Tensor:
    """Return `logits_V` of the byte that follows a text, on every rank."""
    length, last = trainer.options.sequence_length, len(text) - 1
    ids = torch.tensor([[*text, *[0] * (length - len(text))]], device=device())
    where = torch.arange(length, device=device())
    layout, here = trainer.layout, trainer.mesh
    if layout is not None:
        ids, where = shard_sequence(ids, layout, here.rank("cp")), shard_sequence(where, layout, here.rank("cp"), dim=0)
    outputs = trainer.outputs([ids] * trainer.plan.num_microbatches)  # the program has so many; they are all the same
    logits = {m: trainer.model.logits_of(output) for m, output in outputs.items()}  # on every rank: ZeRO-3 gathers
    found = torch.zeros(trainer.config.vocabulary_size, dtype=torch.float64, device="cpu")
    position = (where == last).nonzero().flatten()
    if 0 in logits and len(position) and trainer.data_rank == 0:
        local = logits[0][0, int(position[0])].detach().double().cpu()
        head = trainer.model.stages[max(trainer.model.stages)].head
        assert head is not None, "the last stage has made the outputs"
        first = head.shards["weight"].start  # of this rank of tp, in the vocabulary
        found[first : first + len(local)] = local
    comm.all_reduce(found)  # each entry comes from one rank
    return found
