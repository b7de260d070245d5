"""Every stage of ZeRO against AdamW on one process, against one another, and against the closed forms."""

import pytest
import torch
from models import assert_close, launch, make_batch
from zero_runs import BATCHES, HYPER, STAGES, Blocks, Rare, build, reference, reference_grads, train

from dualpipe_lab.dp.data_parallel import token_loss
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.sharded import full_gradients, full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.sharding import shard_slice


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_weights_equal_one_process(num_ranks):
    """Three steps of every stage in one to three microbatches, the last of fewer; small and large buckets; clipped."""
    ways = [((1, 1, 1), 2**20, None), ((3, 3, 2), 300, 0.5), ((2, 2, 2), 1, None)]

    def fn(rank, world_size):
        rows, found = shard_slice(6, world_size, rank), {}
        for stage in STAGES:
            for numbers, bucket_bytes, max_norm in ways:
                options = {**HYPER, "bucket_bytes": bucket_bytes, "num_backwards": numbers[0]}
                optimizer = build(stage, Rare(seed=rank), options, reshard=numbers[0] != 2)
                for batch, number in zip(BATCHES, numbers, strict=True):
                    train(optimizer, rows, [batch], number, max_norm=max_norm)
                found[stage.__name__, numbers, max_norm] = full_weights(optimizer)
        return found

    expected = {max_norm: reference(BATCHES, max_norm, Rare) for max_norm in (None, 0.5)}
    assert max(expected[0.5][1]) > 0.5  # it does clip
    start = dict(Rare().named_parameters())
    for weights, _ in expected.values():
        assert all((weights[name] - start[name]).abs().max() > 1e-3 for name in weights if name != "blocks.1.0.bias")
    for found in launch(fn, num_ranks):
        for (*_, max_norm), weights in found.items():
            assert_close(weights, expected[max_norm][0])


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


def test_gradients_and_their_norms_are_those_of_one_process():
    """A rank without rows, a parameter that some ranks use, one that nobody uses, one that is frozen."""
    tokens, targets = make_batch()

    def fn(rank, world_size):
        found, rows = [], shard_slice(len(tokens), world_size, rank)
        for stage in (DDP, Zero1, Zero2):
            optimizer = stage(Rare(seed=rank), **HYPER, bucket_bytes=100, reduce="sum")
            if len(tokens[rows]):
                num_tokens = int((targets != -100).sum())
                token_loss(optimizer.module(tokens[rows]), targets[rows], num_tokens).backward()
            found.append((full_gradients(optimizer), optimizer.grad_norm(1.0), optimizer.grad_norm()))
        return found

    expected = reference_grads(tokens, targets)
    norms = [float(torch.cat([grad.flatten() for grad in expected.values()]).norm(p)) for p in (1, 2)]
    for found in launch(fn, 4):
        for gradients, *measured in found:
            assert_close(gradients, expected)
            assert measured == pytest.approx(norms, rel=1e-12)


def misused(optimizer, between):
    for _ in range(2):
        optimizer.module(BATCHES[0][0]).sum().backward()
        between(optimizer)


def test_misuse_is_named():
    def fn(rank, world_size):
        for stage in STAGES:
            with pytest.raises(ValueError, match=r"adds to gradients that are summed already; call zero_grad"):
                misused(build(stage, Blocks(), {}), lambda optimizer: optimizer.step())
            with pytest.raises(ValueError, match="no parameter needs a gradient"):
                build(stage, Blocks().requires_grad_(False), {})
            with pytest.raises(ValueError, match=r"weight is torch.complex128.*train torch.view_as_real"):
                build(stage, Blocks().to(torch.complex128), {})
            if stage is not Zero3:  # which sums in every backward, however many there are
                with pytest.raises(ValueError, match="backward number 2 of the step, and num_backwards=1"):
                    misused(build(stage, Blocks(), {}), lambda optimizer: None)

    launch(fn, 1)
