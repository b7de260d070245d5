"""Every stage of ZeRO against AdamW on one process, against one another, and against the closed forms."""

import pytest
import torch
from models import Tiny, assert_close, launch, make_batch, reference_grads, row_loss
from torch import nn
from zero_runs import BATCHES, HYPER, STAGES, Blocks, build, reference, train

import dualpipe_lab as lab
from dualpipe_lab.dp.adam import AdamW
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.sharded import full_gradients, full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.sharding import shard_slice


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_weights_equal_one_process(num_ranks):
    """Three steps of every stage, with one and three microbatches, small and large buckets."""

    def fn(rank, world_size):
        rows, found = shard_slice(6, world_size, rank), {}
        for stage in STAGES:
            for num_microbatches, bucket_bytes in ((1, 2**20), (3, 300), (2, 1)):
                options = {**HYPER, "bucket_bytes": bucket_bytes, "num_backwards": num_microbatches}
                optimizer = build(stage, Blocks(seed=rank), options, reshard=num_microbatches != 2)
                train(optimizer, rows, BATCHES, num_microbatches)
                found[stage.__name__, num_microbatches] = full_weights(optimizer)
        return found

    expected, _ = reference(BATCHES)
    out = launch(fn, num_ranks)
    start = dict(Blocks().named_parameters())
    assert all((expected[name] - start[name]).abs().max() > 1e-3 for name in expected if name != "blocks.1.0.bias")
    for found in out:
        for weights in found.values():
            assert_close(weights, expected)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_whole_gradients_are_those_of_one_process(num_ranks):
    """Raw gradients, on ranks that were seeded differently; a rank's shards alone would not compare."""
    tokens, targets = BATCHES[0]

    def fn(rank, world_size):
        found, rows = [], shard_slice(len(tokens), world_size, rank)
        for stage in STAGES:
            optimizer = build(stage, Blocks(seed=rank), HYPER)
            loss = nn.functional.cross_entropy(
                optimizer.module(tokens[rows]).flatten(0, 1), targets[rows].flatten(), reduction="sum"
            )
            (loss / int((targets != -100).sum())).backward()
            found.append(full_gradients(optimizer))
        return found

    model = Blocks()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    expected = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert any(grad.any() for grad in expected.values())
    for found in launch(fn, num_ranks):
        for gradients in found:
            assert_close(gradients, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_steps_may_differ_in_their_microbatches(num_ranks):
    """A last, partial window of accumulation."""

    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            optimizer = build(stage, Blocks(), {**HYPER, "num_backwards": 3})
            for batch, num_microbatches in zip(BATCHES, (3, 3, 2), strict=True):
                train(optimizer, shard_slice(6, world_size, rank), [batch], num_microbatches)
            found.append(full_weights(optimizer))
        return found

    expected, _ = reference(BATCHES)
    for found in launch(fn, num_ranks):
        for weights in found:
            assert_close(weights, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_stages_equal_one_another_bitwise(num_ranks):
    """The three stages scatter, in the order of the ranks: the same bits.  A sum of two has no other order, so DDP too.

    On more ranks DDP's all-reduce adds each chunk in an order of its own, and the last digits differ.
    """

    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            model = Blocks(torch.float32, tied=False)
            # one bucket per parameter, so that all stages sum the same buffers
            groups = [{"params": p, "lr": 0.01 + 1e-9 * at} for at, p in enumerate(model.parameters())]
            optimizer = build(stage, model, {"params": groups, "weight_decay": 0.1})
            train(optimizer, shard_slice(6, world_size, rank), BATCHES, 1)
            found.append(full_weights(optimizer))
        return found

    for ddp, first, *others in launch(fn, num_ranks):
        for weights in [*others, *([ddp] if num_ranks == 2 else [])]:
            assert all(torch.equal(weights[name], first[name]) for name in first)


def test_a_tiny_model_whose_ranks_use_different_parameters():
    """A rank without rows, a parameter that one rank uses, a parameter that nobody uses; 7 x 5 over 4 ranks."""
    tokens, targets = make_batch()

    def fn(rank, world_size):
        found = []
        for stage in (DDP, Zero1, Zero2):
            optimizer = stage(Tiny(seed=rank), **HYPER, bucket_bytes=100)
            rows = shard_slice(len(tokens), world_size, rank)
            loss = row_loss(optimizer.module, tokens[rows], targets[rows], int((targets != -100).sum()))
            if loss.requires_grad:
                loss.backward()
            report = optimizer.step(max_norm=0.1)
            found.append((full_weights(optimizer), report.norm, optimizer.grad_norm(1.0)))
        return found

    model = Tiny()
    optimizer, grads = AdamW(model.parameters(), **HYPER), reference_grads(tokens, targets)
    for name, parameter in model.named_parameters():
        parameter.grad = grads.get(name)
    one_norm = float(sum(grad.abs().sum() for grad in grads.values()))
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    optimizer.step()
    for found in launch(fn, 4):
        for weights, measured, measured_one in found:
            assert_close(weights, {name: parameter.detach() for name, parameter in model.named_parameters()})
            assert measured == pytest.approx(norm, rel=1e-12)
            assert measured_one == pytest.approx(one_norm, rel=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_clipping_is_by_the_norm_of_the_whole(num_ranks):
    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            optimizer = build(stage, Blocks(), HYPER)
            train(optimizer, shard_slice(6, world_size, rank), BATCHES, 1, max_norm=0.5)
            found.append(full_weights(optimizer))
        return found

    expected, norms = reference(BATCHES, max_norm=0.5)
    assert max(norms) > 0.5
    for found in launch(fn, num_ranks):
        for weights in found:
            assert_close(weights, expected)


def test_values_of_param_groups_hold_across_shard_borders():
    """No decay for the biases, though they share their type with the weights."""

    def groups(model):
        named = dict(model.named_parameters()).items()
        biases = [p for name, p in named if p.requires_grad and name.endswith("bias")]
        others = (p for name, p in named if p.requires_grad and not name.endswith("bias"))
        return [{"params": biases, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.5}]

    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            model = Blocks()
            optimizer = build(stage, model, {"params": groups(model), "lr": 0.01})
            train(optimizer, shard_slice(6, world_size, rank), BATCHES, 1)
            found.append(full_weights(optimizer))
        return found

    model = Blocks()
    named = dict(model.named_parameters())
    optimizer = AdamW(groups(model), lr=0.01)
    for tokens, targets in BATCHES:
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        model.blocks[2].unused.grad = torch.zeros_like(model.blocks[2].unused)
        optimizer.step()
    for found in launch(fn, 3):
        for weights in found:
            assert_close(weights, {name: parameter.detach() for name, parameter in named.items()})


@pytest.mark.parametrize("stage", [DDP, Zero1, Zero2, Zero3])
def test_misuse_is_named(stage):
    def forget_to_zero(rank, world_size):
        optimizer = build(stage, Blocks(), {})
        for _ in range(2):
            optimizer.module(BATCHES[0][0]).sum().backward()
            optimizer.step()

    def frozen(rank, world_size):
        build(stage, Blocks().requires_grad_(False), {})

    def too_often(rank, world_size):
        optimizer = build(stage, Blocks(), {})
        for _ in range(2):
            optimizer.module(BATCHES[0][0]).sum().backward()

    with pytest.raises(lab.RankError, match=r"adds to gradients that are summed already; call zero"):
        launch(forget_to_zero, 1)
    with pytest.raises(lab.RankError, match="no parameter needs a gradient"):
        launch(frozen, 1)
    if stage is not Zero3:  # which sums in every backward, however many there are
        with pytest.raises(lab.RankError, match="backward number 2 of the step"):
            launch(too_often, 1)
