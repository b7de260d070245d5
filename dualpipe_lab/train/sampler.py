"""`Sampler`: which sequences a step trains on, as a pure function of seed, step and place in the global batch.

Chapter: book/whole/training.  In: a text or documents, coordinates.  Out: this rank's microbatches of a step.
  sequence i of a step       drawn by a generator seeded with (seed, step, i)
  data rank r, microbatch m  sequences (r M + m) b to (r M + m + 1) b - 1,     b = global batch / (data ranks * M)
Every plan with one global batch therefore sees the same sequences, and the state of the data is two numbers, seed and
step.  Ranks of tp and pp call with the same coordinates; those of cp take their shares of the same sequences.
Elsewhere: torch `DistributedSampler`, which shuffles per epoch; Megatron `MegatronPretrainingRandomSampler`; d9d
`BufferSortedDataset`, which is `LengthSampler`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Any

import torch
from torch import Tensor

from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.data import VOCABULARY_SIZE
from dualpipe_lab.launch.context import device
from dualpipe_lab.models.mtp import next_tokens

_TEXTS = (str, bytes, bytearray, memoryview)
IGNORE_INDEX = -100  # the target of a token that has no loss; that of `dp`


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step.

    Attributes:
        inputs, targets: `ids_BS` and `targets_BS` per microbatch; -100 is no target.
        next_inputs, next_targets: the same one position further, where a second token is predicted; else empty.
        num_tokens: valid targets of the step, over all ranks.
        num_sequences: of the step, over all ranks.
        padding: `padding_BS` per microbatch, True behind the end of a document; empty where nothing is padded.  Experts
            take it: `extra_inputs(padding=batch.padding)`.
    """

    inputs: list[Tensor]
    targets: list[Tensor]
    num_tokens: int
    num_sequences: int
    next_inputs: list[Tensor] = field(default_factory=list)
    next_targets: list[Tensor] = field(default_factory=list)
    padding: list[Tensor] = field(default_factory=list)


class Sampler:
    """Draws sequences from a text, or from documents of unequal length.

    Args:
        data: one text, of which every sequence is a random window; or documents, of which a sequence is the beginning
            of one, padded where it is shorter.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step, over all ranks.
        seed: of the draws.
        growth: pairs of a step and the global batch from there on.

    Raises:
        ValueError: a size below 1, a text shorter than a window, or a document of less than 2 bytes.

    >>> Sampler(b"one two three", sequence_length=3, global_batch=2).rows(step=0, first=0, count=2)
    [b'wo t', b'one ']
    """

    def __init__(
        self,
        data: bytes | Sequence[bytes],
        sequence_length: int,
        global_batch: int,
        seed: int = 0,
        growth: Sequence[tuple[int, int]] = (),
    ) -> None:
        parts = list(data) if isinstance(data, Sequence) and not isinstance(data, _TEXTS) else [data]
        if wrong := [type(part).__name__ for part in parts if not isinstance(part, bytes)]:
            raise ValueError(f"a text is bytes, and documents are a list of bytes, got {wrong[0]}; use text.encode()")
        self.text, self.documents = (data, []) if isinstance(data, bytes) else (b"", list(data))
        self.sequence_length, self.global_batch, self.seed = sequence_length, global_batch, seed
        self.growth = tuple(growth)
        if sequence_length < 1 or global_batch < 1:
            raise ValueError(
                f"sequence_length and global_batch count from 1, got {sequence_length} and {global_batch}; "
                "use at least 1"
            )
        if not self.documents and len(self.text) <= sequence_length:
            raise ValueError(
                f"a window takes sequence_length + 1 = {sequence_length + 1} bytes, and the corpus has "
                f"{len(self.text)}; use a shorter sequence_length or a longer corpus"
            )
        if short := [number for number, document in enumerate(self.documents) if len(document) < 2]:
            raise ValueError(
                f"document {short[0]} has {len(self.documents[short[0]])} bytes: a token needs a next one to predict; "
                "leave out documents of less than 2 bytes"
            )

    def batch_size(self, step: int) -> int:
        """Return the sequences of a step, over all ranks.

        >>> grown = Sampler(b"one two three", 3, global_batch=2, growth=[(1, 4), (3, 8)])
        >>> [grown.batch_size(step) for step in range(4)]
        [2, 4, 4, 8]
        """
        return [self.global_batch, *(size for start, size in self.growth if step >= start)][-1]

    def rows(self, step: int, first: int, count: int) -> list[bytes]:
        """Return sequences `first` to `first + count - 1` of a step, of at most `sequence_length + 1` bytes."""
        rows = []
        for number in range(first, first + count):
            # random() is the one method whose sequence Python promises to keep between versions
            draw = Random(f"{self.seed}/{step}/{number}").random()  # noqa: S311 (data, no secret)
            if self.documents:
                row, start = self.documents[int(draw * len(self.documents))], 0
            else:
                row, start = self.text, int(draw * (len(self.text) - self.sequence_length))
            rows.append(row[start : start + self.sequence_length + 1])
        return rows

    def padded_length(self, rows: list[bytes]) -> int:
        """Return the tokens of each sequence of a microbatch, padding included."""
        return self.sequence_length

    def num_tokens(self, step: int) -> int:
        """Return the number of valid targets of a step, over all ranks."""
        if not self.documents:
            return self.batch_size(step) * self.sequence_length
        return sum(len(row) - 1 for row in self.rows(step, 0, self.batch_size(step)))

    def batch(
        self,
        step: int,
        num_microbatches: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        layout: SequenceLayout | None = None,
        cp_rank: int = 0,
        mtp: bool = False,
    ) -> Batch:
        """Return one rank's microbatches of a step, on the rank's device.

        Args:
            step: from 0.
            num_microbatches: per data rank.
            data_rank: this rank's number among those with sequences of their own.
            data_size: their number.
            layout: which positions of a sequence each rank of cp holds (default: all).
            cp_rank: this rank's number along cp.
            mtp: whether a second token is predicted: full sequences are shifted, and then shared out.

        Raises:
            ValueError: the global batch does not divide, or sequences of one token have no second one.
        """
        if not 0 <= data_rank < data_size:
            raise ValueError(f"data ranks are 0 to {data_size - 1}, got {data_rank}")
        size = microbatch_size(self.batch_size(step), data_size, num_microbatches)
        firsts = [(data_rank * num_microbatches + number) * size for number in range(num_microbatches)]
        microbatches = []
        for rows in (self.rows(step, first, size) for first in firsts):
            length = self.padded_length(rows)
            inputs = torch.tensor([[*row[:-1], *[0] * (length + 1 - len(row))] for row in rows], device=device())
            targets = torch.tensor(
                [[*row[1:], *[IGNORE_INDEX] * (length + 1 - len(row))] for row in rows], device=device()
            )
            ends = torch.tensor([[len(row) - 1] for row in rows], device=device())
            found = [inputs, targets, torch.arange(length, device=device()) >= ends]
            found += next_tokens(inputs, targets) if mtp else ()
            microbatches.append(
                found if layout is None else [shard_sequence(tensor, layout, cp_rank) for tensor in found]
            )
        all_inputs, all_targets, masks, *shifted = (list(tensors) for tensors in zip(*microbatches, strict=True))
        next_inputs, next_targets = shifted or ([], [])
        padding = masks if any(mask.any() for mask in masks) else []
        counts = self.num_tokens(step), self.batch_size(step)
        return Batch(all_inputs, all_targets, *counts, next_inputs, next_targets, padding)

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint saves of the data: `step` is the next one."""
        sizes = {"sequence_length": self.sequence_length, "global_batch": self.global_batch}
        grows = {"batch_growth": [list(pair) for pair in self.growth]} if self.growth else {}
        return {"seed": self.seed, "step": step, **sizes, **grows}


class LengthSampler(Sampler):
    """Takes every document once per epoch, and beside documents of about its own length.

    An epoch is a permutation drawn from seed and epoch.  Each `buffer` of global batches of it is sorted by length and
    cut into steps, whose order is drawn, so lengths do not rise with the steps.  A microbatch is padded to its longest
    document, by every plan differently; all train equally, because nothing routes or counts padding.  cp and sequence
    parallelism refuse lengths that they cannot shard.

    Args:
        documents: as many as fill whole steps.
        sequence_length: the most tokens of a sequence.
        global_batch: sequences of a step, over all ranks.
        seed: of the permutations.
        buffer: of so many global batches; with 1, which sorts each alone, the last data rank has the longest documents.

    Raises:
        ValueError: as `Sampler`, a buffer below 1, or documents that do not fill whole steps.

    >>> sampler = LengthSampler([b"abcd", b"ab", b"abcde", b"abc"], sequence_length=8, global_batch=2)
    >>> [sampler.rows(step, 0, 2) for step in (0, 1)]
    [[b'ab', b'abc'], [b'abcd', b'abcde']]
    """

    def __init__(
        self, documents: Sequence[bytes], sequence_length: int, global_batch: int, seed: int = 0, buffer: int = 8
    ) -> None:
        super().__init__(documents, sequence_length, global_batch, seed)
        rest = len(self.documents) % global_batch
        if buffer < 1 or rest or not self.documents:
            raise ValueError(
                f"an epoch has whole steps, and a buffer at least one of them, got {len(self.documents)} documents, "
                f"global_batch={global_batch} and buffer={buffer}; leave out {rest} documents"
            )
        self.buffer, self._ordered = buffer, (-1, list[list[int]]())  # the last epoch asked for, and its steps

    def rows(self, step: int, first: int, count: int) -> list[bytes]:
        """Return sequences `first` to `first + count - 1` of a step, sorted by length."""
        epoch, place = divmod(step, len(self.documents) // self.global_batch)
        if self._ordered[0] != epoch:
            self._ordered = epoch, self._order(epoch)
        numbers = self._ordered[1][place][first : first + count]
        return [self.documents[number][: self.sequence_length + 1] for number in numbers]

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint has of the data: also what the order within an epoch depends on."""
        return {**super().state(step), "buffer": self.buffer, "num_documents": len(self.documents)}

    def padded_length(self, rows: list[bytes]) -> int:
        """Return the tokens of the longest sequence of a microbatch."""
        return max(len(row) for row in rows) - 1

    def _order(self, epoch: int) -> list[list[int]]:
        """Return the numbers of the documents of each step of an epoch."""
        draw, size = Random(f"{self.seed}/{epoch}"), self.buffer * self.global_batch  # noqa: S311 (data, no secret)
        order = sorted(range(len(self.documents)), key=lambda number: draw.random())
        buffers = (sorted(order[i : i + size], key=self._length) for i in range(0, len(order), size))
        numbers = list(chain.from_iterable(buffers))
        steps = [numbers[i : i + self.global_batch] for i in range(0, len(numbers), self.global_batch)]
        return sorted(steps, key=lambda step: draw.random())

    def _length(self, number: int) -> int:
        return min(len(self.documents[number]), self.sequence_length + 1)


def microbatch_size(global_batch: int, data_size: int, num_microbatches: int) -> int:
    """Return the sequences of one microbatch; the error has the nearest global batch that divides."""
    parts = data_size * num_microbatches
    if global_batch < 1 or global_batch % parts:
        fits = sorted({max(global_batch // parts, 1) * parts, (global_batch // parts + 1) * parts})
        raise ValueError(
            f"a global batch of {global_batch} sequences does not divide among {data_size} data ranks x "
            f"{num_microbatches} microbatches = {parts}; use {' or '.join(map(str, fits))}"
        )
    return global_batch // parts


def check_vocabulary(vocabulary_size: int) -> None:
    """Raise ValueError for a model that does not know every byte."""
    if vocabulary_size < VOCABULARY_SIZE:
        raise ValueError(
            f"a token is a byte, and the model knows {vocabulary_size} of {VOCABULARY_SIZE}; "
            f"use vocabulary_size={VOCABULARY_SIZE} or more"
        )
