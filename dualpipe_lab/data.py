"""Corpus of bytes without a download: the Markdown pages of the course.

Chapters: all that train a model.  In: batch size, sequence length, seed.  Out: batches of token ids, 0 to 255.
  tokens per batch   batch_size * (sequence_length + 1)     the last column is only a target
One token is one byte.  The text is every page below book/, ordered by path, with Unix line ends.  It grows with the
course, so a number that depends on it is compared within one run and not with a stored number.  Without the book (an
installed wheel) the text is the description of the package, the README.

The frozen corpus, `frozen_corpus()`, does not grow: it is the text of the chapters on 22 November 2026, without code
cells, tables and figures, 295,199 bytes in `frozen_corpus.txt`.  It is copyright (c) 2026 the DualPipe Lab authors,
licensed under the Creative Commons Attribution 4.0 International License (CC BY 4.0), as all text of the book.
"""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal

from dualpipe_lab.timeline import Timeline

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VOCABULARY_SIZE = 256
EVALUATION_SHARE = 0.05  # of the frozen corpus: its end, which no training reads
_CHECKOUT = Path(__file__).resolve().parents[1]
_FROZEN = Path(__file__).with_name("frozen_corpus.txt")
_SLOW_HOST = Path(__file__).with_name("slow_host.json")


def corpus(root: Path | None = None) -> bytes:
    """Return the text of the course as bytes; `root` is the checkout with book/ (by default that of this file).

    Raises:
        FileNotFoundError: there is neither a book/ folder nor an installed package description.
    """
    pages = sorted(((root or _CHECKOUT) / "book").rglob("*.md"), key=lambda page: page.as_posix())
    pages = [page for page in pages if ".ipynb_checkpoints" not in page.parts]
    if pages:
        return b"\n".join(page.read_bytes().replace(b"\r\n", b"\n") for page in pages)
    return _description(root or _CHECKOUT)


def _description(root: Path) -> bytes:
    try:
        text = metadata.metadata("dualpipe-lab").json.get("description", "")
    except metadata.PackageNotFoundError:
        text = ""
    if not text:
        raise FileNotFoundError(
            f"the corpus needs the course's pages, and {root / 'book'} has no .md file; "
            "work in a clone of the repository, or pass corpus(root=PATH_OF_A_CLONE)"
        )
    return str(text).encode()


def frozen_corpus(split: Literal["train", "evaluation"] = "train") -> bytes:
    """Return the frozen text of the course: its first 95 %, or the last 5 % to evaluate with.

    Raises:
        ValueError: another split.

    >>> len(frozen_corpus()), len(frozen_corpus("evaluation"))
    (280440, 14759)
    """
    if split not in ("train", "evaluation"):
        raise ValueError(f'the frozen corpus has the splits "train" and "evaluation", got {split!r}')
    text = _FROZEN.read_bytes().replace(b"\r\n", b"\n")
    end = len(text) - int(len(text) * EVALUATION_SHARE)
    return text[:end] if split == "train" else text[end:]


def windows(text: bytes, batch_size: int, sequence_length: int, seed: int = 0) -> Iterator[list[bytes]]:
    """Yield batches of `batch_size` random slices of the text, each of `sequence_length + 1` bytes, without end.

    Equal arguments, `seed` included, give equal batches in every process, so ranks agree without a message.

    Raises:
        ValueError: a size is below 1, or the text is shorter than one slice.

    >>> next(windows(b"one two three", batch_size=2, sequence_length=3, seed=1))
    [b'ne t', b'thre']
    """
    if batch_size < 1 or sequence_length < 1:
        raise ValueError(
            f"batch_size and sequence_length count from 1, got {batch_size} and {sequence_length}; use at least 1"
        )
    num_starts = len(text) - sequence_length
    if num_starts < 1:
        raise ValueError(
            f"a slice takes sequence_length + 1 = {sequence_length + 1} bytes, and the text has {len(text)}; "
            "use a shorter sequence_length or a longer text"
        )
    return _draw(text, batch_size, sequence_length + 1, num_starts, Random(seed))  # noqa: S311 (data, no secret)


def _draw(text: bytes, batch_size: int, length: int, num_starts: int, random: Random) -> Iterator[list[bytes]]:
    while True:
        # random() is the one method whose sequence Python promises to keep between versions
        starts = [int(random.random() * num_starts) for _ in range(batch_size)]
        yield [text[start : start + length] for start in starts]


def batches(
    batch_size: int,
    sequence_length: int,
    seed: int = 0,
    text: bytes | None = None,
    device: "torch.device | str | None" = None,
) -> Iterator[tuple["Tensor", "Tensor"]]:
    """Yield (inputs_BS, targets_BS) of int64 token ids without end; targets are the inputs shifted by one token.

    B: batch_size, S: sequence_length.  `device`: where the tensors live (default: `lab.device()`, that of the rank).

    Raises:
        ValueError: as `windows`.
    """
    slices = windows(corpus() if text is None else text, batch_size, sequence_length, seed)
    return (_as_tensors(rows, device) for rows in slices)


def _as_tensors(rows: list[bytes], device: "torch.device | str | None") -> tuple["Tensor", "Tensor"]:
    import torch  # here, so that the module is importable in milliseconds

    from dualpipe_lab.launch import context

    tokens = torch.tensor([list(row) for row in rows], device=context.device() if device is None else device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def slow_host_run() -> Timeline:
    """Return a stored run: one step of a pipeline over two hosts, of which host 1 sends at 10 Mbit per second.

    Recorded on 25 November 2026 on two hosts with networks of their own and two ranks each, pp 2 x dp 2; the script is
    that of the chapter book/hosts/many-hosts.  Times are in ns on the clock of rank 0, within 439 us.
    """
    return Timeline.from_dict(json.loads(_SLOW_HOST.read_text(encoding="utf-8")))
