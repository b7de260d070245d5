"""The embedding and the head, cut over the vocabulary: bits of one table, tied weights, padding, empty parts."""

import pytest
import torch
from runs import RANKS, assert_refused, draw, launch
from torch import nn
from tp_runs import TOKENS, local, modes

from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.shard import full_state_dict


def whole_table(vocabulary, width, padding=None):
    return nn.Embedding.from_pretrained(draw(1, vocabulary, width), freeze=False, padding_idx=padding)


@pytest.mark.parametrize("world_size", RANKS)
def test_the_bits_are_those_of_one_table(world_size):
    """Vocabularies of 37 and 7, and of 4, of which the last of 3 ranks has nothing; tokens repeat."""

    def fn(rank, world_size):
        different = []
        for name, tp in modes().items():
            cut = tp.sequence_parallel
            for vocabulary in (37, 7, 4):
                for padding, modulus in ((None, vocabulary), (3, vocabulary), (None, 1)):  # the last: of one rank alone
                    full = whole_table(vocabulary, 5, padding)
                    ids = torch.arange(2 * TOKENS).view(2, TOKENS) ** 2 % modulus
                    dy = torch.round(draw(2, 2, TOKENS, 5) * 8)  # whole numbers: repeated tokens add up exactly
                    x = full(ids)
                    x.backward(dy)
                    table = VocabParallelEmbedding.from_full(full, tp)
                    found = table(ids)
                    found.backward(local(dy, 1, tp, cut))
                    grad = full_state_dict(table, tp.group, "grad")["weight"]
                    same = torch.equal(found, local(x, 1, tp, cut)) and torch.equal(grad, full.weight.grad)
                    if not same or not torch.equal(full_state_dict(table, tp.group)["weight"], full.weight):
                        different.append((name, vocabulary, padding))
        return different

    assert launch(fn, world_size) == [[]] * world_size


def test_tokens_outside_of_the_vocabulary_are_refused():
    cases = [
        (lambda: VocabParallelEmbedding(7, 2)(torch.tensor([3, 7])), "ids run from 0 to 6, got 7"),
        (lambda: VocabParallelEmbedding(7, 2)(torch.tensor([-1])), "ids run from 0 to 6, got -1"),
        (lambda: VocabParallelEmbedding(7, 2)(torch.tensor([3.0])), "whole numbers, got torch.float32; use ids.long"),
        (lambda: VocabParallelEmbedding(7, 2, padding_id=7), "padding_id is a token from 0 to 6, got 7"),
    ]
    assert_refused(2, cases)
