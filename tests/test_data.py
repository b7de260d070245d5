"""The corpus is deterministic, complete and says what is missing."""

from importlib import metadata
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab import data

ROOT = Path(__file__).parents[1]


def test_corpus_is_every_page_in_order_of_path():
    pages = sorted((page for page in (ROOT / "book").rglob("*.md")), key=lambda page: page.as_posix())
    pages = [page for page in pages if ".ipynb_checkpoints" not in page.parts]
    assert data.corpus() == b"\n".join(page.read_bytes() for page in pages)
    assert len(data.corpus()) > 10_000


def test_line_ends_and_foreign_files_do_not_change_the_corpus(tmp_path):
    (tmp_path / "book" / "b").mkdir(parents=True)
    (tmp_path / "book" / "b" / "page.md").write_bytes(b"two\r\nlines")
    (tmp_path / "book" / "a.md").write_bytes(b"first")
    (tmp_path / "book" / "a.ipynb").write_bytes(b"{}")
    assert data.corpus(tmp_path) == b"first\ntwo\nlines"


def test_without_the_book_the_corpus_is_the_package_description(tmp_path):
    assert data.corpus(tmp_path).startswith(b"# DualPipe Lab")


def test_nothing_to_read_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", absent)
    with pytest.raises(FileNotFoundError, match="work in a clone of the repository"):
        data.corpus(tmp_path)


@given(
    text=st.binary(min_size=1, max_size=60),
    batch_size=st.integers(1, 4),
    sequence_length=st.integers(1, 20),
    seed=st.integers(0, 3),
)
def test_every_window_is_a_slice_of_the_text_or_an_error(text, batch_size, sequence_length, seed):
    for sizes in ((0, sequence_length), (batch_size, 0)):
        with pytest.raises(ValueError, match="count from 1"):
            data.windows(text, *sizes)
    if len(text) <= sequence_length:
        with pytest.raises(ValueError, match="use a shorter sequence_length"):
            data.windows(text, batch_size, sequence_length, seed)
        return
    first, again = (list(islice(data.windows(text, batch_size, sequence_length, seed), 3)) for _ in range(2))
    assert first == again
    assert all(len(rows) == batch_size for rows in first)
    assert all(len(row) == sequence_length + 1 and row in text for rows in first for row in rows)


def test_windows_reach_both_ends_of_the_text_and_depend_on_the_seed():
    drawn = {row for rows in islice(data.windows(b"abcde", 4, 2), 50) for row in rows}
    assert drawn == {b"abc", b"bcd", b"cde"}
    assert next(data.windows(b"x" + bytes(range(200)), 4, 8, 0)) != next(
        data.windows(b"x" + bytes(range(200)), 4, 8, 1)
    )


def test_targets_are_the_inputs_one_step_ahead():
    inputs, targets = next(data.batches(3, 8, seed=5))
    assert inputs.dtype == torch.int64
    assert inputs.shape == targets.shape == (3, 8)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    rows = next(data.windows(data.corpus(), 3, 8, seed=5))
    assert [bytes(row.tolist()) for row in torch.cat([inputs, targets[:, -1:]], dim=1)] == rows
