"""`generate`: write text with a trained model, one byte at a time, from a checkpoint alone.

Chapter: book/whole/training.  In: a checkpoint of any plan, a beginning.  Out: the beginning and what the model adds.
Every byte is one forward of the last `sequence_length` bytes: no keys and values are kept, so n bytes cost n forwards.
Elsewhere: vLLM and Megatron's `generate` keep keys and values.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from dualpipe_lab.data import VOCABULARY_SIZE
from dualpipe_lab.dp.checkpoint.reader import Checkpoint
from dualpipe_lab.launch.context import device
from dualpipe_lab.train.options import find_checkpoint
from dualpipe_lab.train.sampler import check_vocabulary
from dualpipe_lab.train.saved_model import PlainModel, read_model


def generate(
    source: str | Path,
    prompt: str | bytes,
    num_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    sequence_length: int | None = None,
) -> str:
    """Return a prompt continued by `num_tokens` bytes, by the full model in this process, without ranks and plan.

    Args:
        source: a checkpoint, or a folder of them, of which the last is taken: `result.checkpoint` after a run.
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
    model, length = _read(source, sequence_length)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([list(text[-length:])], device=device()))
        known = logits[0, -1, :VOCABULARY_SIZE].double().cpu()  # a token is a byte
        if known.isnan().any():
            raise ValueError("the model has diverged: logits are NaN, and no text follows; use a smaller lr")
        drawn = torch.multinomial((known / temperature).softmax(0), 1, generator=generator) if temperature else None
        text.append(int(known.argmax() if drawn is None else drawn))
    return text.decode(errors="replace")


def _read(path: Path | str, sequence_length: int | None) -> tuple[PlainModel, int]:
    """Return the model of a checkpoint, and how many bytes it reads."""
    found = find_checkpoint(path)  # once: a training that goes on may save a later one meanwhile
    sampler = Checkpoint(found).index.values["sampler"]
    length = sequence_length or (sampler["sequence_length"] if isinstance(sampler, Mapping) else None)
    if length is None:
        raise ValueError(f"{found} does not say how long its sequences were; give sequence_length=")
    model = read_model(found)
    check_vocabulary(model.config.vocabulary_size)
    return model, length
