"""The loss, in chunks and at once, against plain torch: values, raw gradients, messages, what is kept, its peak."""

from math import prod

import pytest
import torch
from runs import RANKS, Made, assert_a1, counted, distances, draw, kept, launch, leaf
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from tp_runs import local

from dualpipe_lab.tp import (
    LMHead,
    TensorParallel,
    VocabParallelEmbedding,
    chunked_cross_entropy,
    full_state_dict,
    load_full_state_dict,
)

IGNORE, HIDDEN, WORDS, TOKENS = -100, 6, 37, 12  # of two sequences; 37 words: the last shard is shorter
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "all smoothing": {"label_smoothing": 1.0, "reduction": "sum"},
    "smoothing of each": {"label_smoothing": 0.1, "reduction": "none"},
    "smoothing": {"label_smoothing": 0.3},
    "of a step": {"num_tokens": 50},
    "ignored 5": {"ignore_index": 5},
}


def cases():
    """x, targets: of 24 tokens; the second third, which is chunks of 4 or 8, has no target; one has none at all."""
    x = draw(1, 2, TOKENS, HIDDEN)
    targets = (torch.arange(2 * TOKENS) * 11 % WORDS).view(2, TOKENS)
    targets[0, 8:], targets[1, :4], targets[1, 6] = IGNORE, IGNORE, IGNORE
    return {
        "gaps": (x, targets),
        "large": (x * 500, targets),
        "without a target": (x, torch.full_like(targets, IGNORE)),
        "no tokens": (x[:, :0], targets[:, :0]),
        "transposed": (x.transpose(0, 1).contiguous().transpose(0, 1), targets),
    }


def weight_of(size=WORDS):
    return draw(2, size, HIDDEN)


def weighted(loss):
    """One number whose gradient differs from token to token where the loss has one for each."""
    return (loss * (torch.arange(loss.numel(), dtype=loss.dtype).view(loss.shape) + 1)).sum()


def plain(x, weight, targets, ignore_index=IGNORE, label_smoothing=0.0, reduction="mean", num_tokens=None):
    """The loss of the full weight in plain torch, with raw gradients."""
    x, weight = leaf(x), leaf(weight)
    logits, flat = (x @ weight.t()).flatten(0, 1), targets.flatten()
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    losses = functional.cross_entropy(logits, flat, reduction="none", **how)
    count = max(int((flat != ignore_index).sum()), 1) if num_tokens is None else num_tokens
    loss = {"none": losses.view(targets.shape), "sum": losses.sum(), "mean": losses.sum() / count}[reduction]
    weighted(loss).backward()
    return {"loss": loss.detach(), "dx": x.grad, "dW": weight.grad}


def ours(x, weight, targets, chunk, tp, **options):
    """The same of this rank's shard, its gradients in full; under sequence parallelism dx of the rank's tokens."""
    head = LMHead(HIDDEN, len(weight), tp=tp, dtype=weight.dtype)
    load_full_state_dict(head, {"weight": weight})
    x = local(x, 1, tp, tp.sequence_parallel)
    x = x.detach().requires_grad_()  # with the strides that it has
    loss = head.loss(x, targets, chunk=chunk, **options)
    weighted(loss).backward()
    return {"loss": loss.detach(), "dx": x.grad, "dW": full_state_dict(head, of="grad")["weight"]}


def tied(ids, weight, targets, chunk, tp):
    """Loss and gradient of a table that is also the head's weight."""
    table = VocabParallelEmbedding(*weight.shape, tp=tp, dtype=weight.dtype)
    head = LMHead(HIDDEN, len(weight), tp=tp, tied=table, dtype=weight.dtype)
    load_full_state_dict(table, {"weight": weight})
    loss = head.loss(table(ids).sin(), targets, chunk=chunk)
    loss.backward()
    return {"loss": loss.detach(), "dW": full_state_dict(table, of="grad")["weight"]}


def plain_tied(ids, weight, targets):
    weight = leaf(weight)
    loss = functional.cross_entropy((weight[ids].sin() @ weight.t()).flatten(0, 1), targets.flatten())
    loss.backward()
    return {"loss": loss.detach(), "dW": weight.grad}


@pytest.mark.parametrize("world_size", RANKS)
def test_it_equals_plain_torch(world_size):
    def fn(rank, world_size):
        found = {}
        modes = {"tp": {}, "in turn": {"overlap": False}, "sequence": {"sequence_parallel": True}}
        modes["sequence, kept"] = {"sequence_parallel": True, "regather": False}
        for mode, settings in modes.items():
            tp = TensorParallel(**settings)
            for case, (x, targets) in cases().items():
                names = OPTIONS if case == "gaps" else ("mean", "smoothing")
                for name, options in ((name, OPTIONS[name]) for name in names):
                    aimed = targets.clamp(min=0) if name == "ignored 5" else targets
                    theirs = plain(x, weight_of(), aimed, **options)
                    theirs["dx"] = local(theirs["dx"], 1, tp, tp.sequence_parallel)
                    for chunk in (None, 4, 7, 100) if name == "mean" else (None, 5):
                        mine = ours(x, weight_of(), aimed, chunk, tp, **options)
                        found[mode, case, name, chunk] = distances(mine, theirs)
            x, targets = cases()["gaps"]
            ids = targets.flip(1).clamp(min=0)
            found[mode, "tied"] = distances(
                tied(ids, weight_of(), targets, 5, tp), plain_tied(ids, weight_of(), targets)
            )
            few = targets.clamp(max=1)  # 2 words: the last of 3 ranks has none
            theirs = plain(x, weight_of(2), few, **OPTIONS["smoothing"])
            theirs["dx"] = local(theirs["dx"], 1, tp, tp.sequence_parallel)
            found[mode, "few"] = distances(ours(x, weight_of(2), few, 5, tp, **OPTIONS["smoothing"]), theirs)
        return found

    assert_a1(launch(fn, world_size))


def test_messages_what_is_kept_and_no_tensor_of_all_logits():
    """As many collectives as the plain loss, whatever the chunk; two numbers per token; at most a chunk's logits."""
    tokens, words = 64, 256

    def fn(rank, world_size):
        found = {}
        targets = torch.arange(tokens) * 3 % words
        for is_sharded in (False, True):
            tp = TensorParallel(sequence_parallel=is_sharded)
            head = LMHead(HIDDEN, words, tp=tp, dtype=torch.float64)
            for chunk in (None, 8, 16, 64):
                x, losses, messages = leaf(draw(1, tokens // (world_size if is_sharded else 1), HIDDEN)), [], []

                def forward(head=head, x=x, chunk=chunk, losses=losses):
                    losses.append(head.loss(x, targets, chunk=chunk))

                with Made() as sizes:
                    saved = kept(lambda forward=forward, messages=messages: messages.append(counted(forward)))
                with sizes:
                    messages.append(counted(losses[0].backward))
                known = {x.data_ptr(), head.weight.data_ptr(), targets.data_ptr()}
                numbers = sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in known and tensor.dim())
                found[is_sharded, chunk] = messages, numbers, max(map(prod, sizes.shapes))
        return found

    for found in launch(fn, 2):
        for is_sharded in (False, True):
            for chunk in (8, 16, 64):
                messages, numbers, largest = found[is_sharded, chunk]
                assert messages == found[is_sharded, None][0]  # calls and bytes, forward and backward
                assert messages[0]["all_reduce"][0] == 2
                assert sum(calls for calls, _ in messages[1].values()) == (2 if is_sharded else 1)
                assert numbers == 2 * tokens
                assert largest == max(chunk * words, HIDDEN * words) // 2  # a chunk's logits, or the weight
            assert found[is_sharded, None][2] == tokens * words // 2


def test_a_chunk_without_a_target_costs_no_operation():
    """4 products for each chunk that has a target, of the plain loss 3 for all tokens."""
    tokens, words = 48, 64

    def fn(rank, world_size):
        found, targets = {}, torch.arange(tokens) % words
        head = LMHead(HIDDEN, words, dtype=torch.float64)
        for name, few in (("all", tokens), ("half", tokens // 2), ("one", 1), ("none", 0)):
            for chunk in (None, 8):
                x = leaf(draw(1, tokens, HIDDEN))
                with FlopCounterMode(display=False) as counter:
                    head.loss(x, targets.masked_fill(torch.arange(tokens) >= few, IGNORE), chunk=chunk).backward()
                found[name, chunk] = counter.get_total_flops()
        return found

    product = 2 * tokens * HIDDEN * words // 2
    expected = {"all": product, "half": product // 2, "one": product // 6, "none": 0}
    for found in launch(fn, 2):
        for name, value in expected.items():
            assert found[name, 8] == 4 * value
            assert found[name, None] == 3 * product


def test_16_bits_and_frozen_parts():
    def fn(rank, world_size):
        targets = torch.arange(96) % WORDS
        x, weight = draw(1, 1, 96, HIDDEN).bfloat16(), weight_of().bfloat16()
        exact = plain(x.double(), weight.double(), targets[None])
        mine = ours(x, weight, targets[None], 2, TensorParallel())
        assert mine["loss"].dtype == torch.float32
        assert mine["dx"].dtype == mine["dW"].dtype == torch.bfloat16
        # logits and their gradients are rounded to 8 bits; dW is summed over 48 chunks in 32 bits
        for name, bound in (("loss", 2**-8 * 8), ("dx", 2**-7), ("dW", 2**-7)):
            scale = 1 if name == "loss" else float(exact[name].abs().max())
            assert (mine[name].double() - exact[name]).abs().max() < bound * scale, name
        head, x = LMHead(HIDDEN, WORDS, dtype=torch.float64), leaf(draw(1, 96, HIDDEN))
        head.weight.requires_grad_(False)
        messages = counted(lambda: head.loss(x, targets, chunk=10).backward())
        assert x.grad is not None
        assert head.weight.grad is None
        head.weight.requires_grad_(True)
        frozen = counted(lambda: head.loss(x.detach(), targets, chunk=10).backward())
        assert head.weight.grad is not None
        return {name: calls for name, (calls, _) in messages.items()}, {name: c for name, (c, _) in frozen.items()}

    assert launch(fn, 2) == [({"all_reduce": 3}, {"all_reduce": 2})] * 2


def test_bad_input_is_refused_before_any_message():
    x, targets = torch.zeros(2, 6), torch.arange(2)
    given = {"x": x, "weight": torch.zeros(4, 6), "targets": targets, "vocabulary_size": 7, "chunk": 3}
    wrong = {
        r"a number of tokens of at least 1, got 0; use 1024": {"chunk": 0},
        r"at least 1, got True": {"chunk": True},
        r"need a weight of shape \(4, 6\) for 6 features, got \(2, 6\)": {"weight": x},
        r"needs targets of shape \(2,\), got \(1,\)": {"targets": targets[:1]},
        r"targets run from 0 to 6, got 7": {"targets": targets + 7},
        r"targets are whole numbers, got torch.float32": {"targets": targets.float()},
        r"mean, sum or none, got 'avg'": {"reduction": "avg"},
        r"from 0 to 1, got -0.1": {"label_smoothing": -0.1},
    }

    def fn(rank, world_size):
        def refused():
            for message, change in wrong.items() if rank == 0 else ():
                with pytest.raises(ValueError, match=message):
                    chunked_cross_entropy(**given | change)

        return counted(refused)

    assert launch(fn, 2) == [{}, {}]
