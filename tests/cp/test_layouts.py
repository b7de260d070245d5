"""Layouts: every position on one rank, the rules of each against positions, pairs and critical paths as published."""

import pytest
import torch
from cp_runs import draw
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import RANKS, launch

import dualpipe_lab as lab
from dualpipe_lab.cp.layouts import LAYOUTS, make_layout, visible_pairs
from dualpipe_lab.cp.sequence import next_token_labels, positions, shard_sequence, unshard_sequence


def rounded(name, length, num_ranks):
    """The length, or the next one that zigzag can deal out."""
    return length + (-length % (2 * num_ranks) if name == "zigzag" else 0)


layouts = st.builds(
    lambda name, length, num_ranks: make_layout(name, rounded(name, length, num_ranks), num_ranks),
    st.sampled_from(LAYOUTS),
    st.integers(0, 20),
    st.integers(1, 5),
)


@settings(max_examples=40)
@given(layouts)
def test_every_position_is_held_once_and_in_order(layout):
    held = [layout.positions(rank) for rank in range(layout.num_ranks)]
    assert sorted(position for part in held for position in part) == list(range(layout.length))
    assert all(part == sorted(part) for part in held)
    assert [layout.size(rank) for rank in range(layout.num_ranks)] == list(map(len, held))


@settings(max_examples=40)
@given(layouts, st.booleans())
def test_the_rules_show_exactly_what_positions_allow(layout, causal):
    pairs = visible_pairs(layout, causal)
    for rank in range(layout.num_ranks):
        for source in range(layout.num_ranks):
            queries, keys = positions(layout, rank), positions(layout, source)
            expected = keys[None] <= queries[:, None] if causal else torch.ones(len(queries), len(keys)).bool()
            seen, view = torch.zeros_like(expected), layout.mask(rank, source, causal)
            if view:
                block = torch.ones_like(seen[view.queries, view.keys])
                assert block.numel()
                seen[view.queries, view.keys] = block.tril() if view.is_triangle else block
            assert torch.equal(seen, expected)
            assert pairs[rank][(rank - source) % layout.num_ranks] == int(expected.sum())
    total = layout.length * (layout.length + 1) // 2 if causal else layout.length**2
    assert sum(map(sum, pairs)) == total


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 18, 4), r"2 x 4 equal chunks, and 18 positions do not divide; pad the sequence with 6"),
        (("zigzag", 1, 1), "2 x 1 equal chunks"),
        (("spiral", 16, 4), "a layout is one of contiguous, zigzag, striped, got 'spiral'"),
        (("striped", 16, 0), "at least 1 rank and 0 positions, got 0 and 16"),
        (("striped", -1, 2), "at least 1 rank and 0 positions, got 2 and -1"),
    ],
)
def test_what_a_layout_cannot_do_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_layout(*arguments)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_unshard_undoes_shard_for_any_axis_and_length(num_ranks):
    def fn(rank, world_size):
        for name in LAYOUTS:
            for length in (0, 2, 7):
                layout = make_layout(name, rounded(name, length, world_size), world_size)
                for dim, shape in ((0, (layout.length, 2)), (1, (2, layout.length, 3)), (-1, (2, layout.length))):
                    x = draw(*shape)
                    part = shard_sequence(x, layout, rank, dim)
                    assert torch.equal(unshard_sequence(part, layout, dim), x), (layout, dim)
        tokens = torch.arange(12).view(1, 12)
        layout = make_layout("striped", 12, world_size)
        return shard_sequence(next_token_labels(tokens), layout, rank).tolist(), shard_sequence(
            tokens, layout, rank
        ).tolist()

    for (labels,), (tokens,) in launch(fn, num_ranks):
        assert labels == [token + 1 if token < 11 else -100 for token in tokens]


def test_a_part_of_the_wrong_length_is_named_with_its_rank():
    layout = make_layout("striped", 7, 2)

    def fn(rank, world_size):
        unshard_sequence(torch.zeros(1, 4), layout)

    with pytest.raises(lab.RankError, match=r"(?s)rank 1 of the ring holds 3 positions of <striped layout.*got 4"):
        launch(fn, 2)
    with pytest.raises(lab.RankError, match="used by a group of 1 ranks"):
        launch(fn, 1)
    with pytest.raises(ValueError, match=r"cannot shard axis 1 of \(1, 8\); make it for 8"):
        shard_sequence(torch.zeros(1, 8), layout, 0)
