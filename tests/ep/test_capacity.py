"""Slots of experts: places against a count by hand, what is dropped, gradients."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import draw, leaf

from dualpipe_lab.ep.gshard import (
    DROPPED,
    fill_slots,
    find_slots,
    queue_positions,
    read_slots,
)


def places_by_hand(indices, num_experts):
    used = [0] * num_experts
    places = [[0] * len(row) for row in indices]
    for choice in range(len(indices[0]) if indices else 0):
        for token, row in enumerate(indices):
            places[token][choice] = used[row[choice]]
            used[row[choice]] += 1
    return places


@given(
    experts=st.integers(1, 6).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))),
    num_tokens=st.integers(0, 9),
    num_slots=st.integers(1, 5),
    seed=st.integers(0, 10_000),
)
def test_places_and_slots_of_any_choice(experts, num_tokens, num_slots, seed):
    num_experts, k = experts
    indices = draw(seed, num_tokens, num_experts).argsort(1)[:, :k]
    places = queue_positions(indices, num_experts)
    assert places.tolist() == places_by_hand(indices.tolist(), num_experts)
    slots = find_slots(indices, num_experts, num_slots)
    kept = slots[slots != DROPPED].tolist()
    assert len(set(kept)) == len(kept)  # no slot has two
    load = indices.reshape(-1).bincount(minlength=num_experts)
    assert len(kept) == int(load.clamp(max=num_slots).sum())  # a choice is dropped only where its expert is full
    x = draw(seed + 1, num_tokens, 3)
    filled = fill_slots(x, slots, num_experts * num_slots)
    ones = torch.ones(num_tokens, k, dtype=torch.float64)
    copies = (slots != DROPPED).sum(1, keepdim=True)
    whole = torch.round(8 * x)
    assert torch.equal(read_slots(fill_slots(whole, slots, len(filled)), slots, ones), copies * whole)
    assert filled.any(1).sum() == len(kept)


def test_slots_have_the_gradients_of_autograd():
    indices = draw(3, 7, 5).argsort(1)[:, :3]
    slots = find_slots(indices, 5, 3)
    assert (slots == DROPPED).any()
    x, weights = leaf(draw(4, 7, 2)), leaf(draw(5, 7, 3))
    assert torch.autograd.gradcheck(lambda x: fill_slots(x, slots, 15), (x,))
    assert torch.autograd.gradcheck(lambda f, w: read_slots(f, slots, w), (leaf(draw(6, 15, 2)), weights))
