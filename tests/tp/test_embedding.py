"""The embedding and the head, cut over the vocabulary: bits of one table, tied weights, padding, empty parts."""

import pytest
import torch
from runs import RANKS, assert_refused, counted, draw, launch, leaf
from torch import nn
from tp_runs import TOKENS, local, modes, oracle, tensor

from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.lm_head import LMHead
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


def test_the_oracle_s_tables_and_parts():
    block = oracle("embedding")
    ids = torch.tensor(block["ids"])

    def fn(rank, world_size):
        full = nn.Embedding.from_pretrained(tensor(block["table"]), freeze=False)
        table = VocabParallelEmbedding.from_full(full)
        out = table(ids)
        out.backward(tensor(block["dout"]))
        return out.tolist(), full_state_dict(table, of="grad")["weight"].tolist(), list(table.shards["weight"][1:3])

    for world_size in (2, 3):
        for rank, (out, grad, span) in enumerate(launch(fn, world_size)):
            assert out == block["expected"]["out"]
            assert grad == block["expected"]["dtable"]
            assert span == block["spans"][str(world_size)][rank]


def test_bytes_of_the_lookup_and_of_the_head():
    def fn(rank, world_size):
        found = {}
        for name, tp in modes().items():
            table = VocabParallelEmbedding(8, 4, tp=tp, dtype=torch.float64)
            head = LMHead(4, 8, tp=tp, dtype=torch.float64)
            x = leaf(draw(1, TOKENS // (world_size if tp.sequence_parallel else 1), 4))
            found[name] = (
                counted(lambda table=table: table(torch.zeros(TOKENS, dtype=torch.int64)).sum().backward()),
                counted(lambda head=head, x=x: head(x).sum().backward()),
            )
        return found

    for found in launch(fn, 4):
        part = TOKENS * 4 * 8 * 3 // 4
        assert found["plain"] == ({"all_reduce": (1, 2 * part)},) * 2
        lookup, head = found["sequence"]
        assert lookup == {"reduce_scatter_single": (1, part), "all_gather_single": (1, part)}
        assert head == {"all_gather_single": (2, 2 * part), "reduce_scatter_single": (1, part)}


def test_tokens_outside_of_the_vocabulary_are_refused():
    cases = [
        (lambda: VocabParallelEmbedding(7, 2)(torch.tensor([3, 7])), "ids run from 0 to 6, got 7"),
        (lambda: VocabParallelEmbedding(7, 2)(torch.tensor([-1])), "ids run from 0 to 6, got -1"),
        (lambda: VocabParallelEmbedding(7, 2)(torch.tensor([3.0])), "whole numbers, got torch.float32; use ids.long"),
        (lambda: VocabParallelEmbedding(7, 2, padding_id=7), "padding_id is a token from 0 to 6, got 7"),
    ]
    assert_refused(2, cases)
