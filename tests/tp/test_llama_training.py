"""The Llama in training: replicas that stay equal, norms, microbatches, 16 bits, batches without a target."""

import math

import pytest
import torch
from llama_runs import BATCH, SIZES, batch, plain
from runs import distance, launch

import dualpipe_lab as lab
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.tp.grads import sum_partial_gradients
from dualpipe_lab.tp.shard import full_state_dict, shards_of


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.every)])
def test_replicated_parameters_stay_equal_to_the_bit(world_size):
    """Norms, and KV heads that several ranks hold, after 5 steps of AdamW in fp32; and the loss falls."""
    config = LlamaConfig(**SIZES, num_heads=4, num_kv_heads=1, qk_norm=True)

    def fn(rank, world_size):
        found = []
        for name in ("plain", "sequence"):
            for coalesce in (False, True) if name == "sequence" else (False,):
                model = Llama(config, lab.Topology([("tp", world_size)]), name == "sequence", coalesce=coalesce)
                optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
                for _ in range(5):
                    optimizer.zero_grad()
                    loss = model.loss(*batch(37))
                    loss.backward()
                    sum_partial_gradients(model)
                    optimizer.step()
                    losses.append(float(loss.detach()))
                cut = {n for n, shard in shards_of(model).items() if shard.stop - shard.start < shard.size}
                replicas = {n: p.detach() for n, p in model.named_parameters() if n not in cut}
                found.append((name, replicas, losses))
        return found

    ranks = launch(fn, world_size)
    for rank in ranks[1:]:
        for (name, ours, losses), (_, first, their_losses) in zip(rank, ranks[0], strict=True):
            assert "layers.1.attention.k.weight" in ours
            assert "norm.weight" in ours
            assert losses == their_losses
            assert losses[-1] < losses[0] - 0.3
            for parameter in first:
                assert torch.equal(ours[parameter], first[parameter]), (name, parameter)


def test_16_bits_are_no_worse_than_on_one_process():
    """Against float64, in the mean over all tensors, which does not depend on one machine's luck."""
    config = LlamaConfig(**SIZES, num_heads=4, num_kv_heads=1)
    ids, targets = batch(37)

    def fn(rank, world_size):
        found = []
        for dtype, sequence_parallel in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)):
            model = Llama(config, lab.Topology([("tp", 2)]), sequence_parallel, dtype=dtype)
            state = full_state_dict(model)
            exact = plain(config, {name: value.double() for name, value in state.items()}, ids, targets)
            loss = model.loss(ids, targets)
            loss.backward()
            ours = {"loss": loss.detach()} | full_state_dict(model, of="grad")
            results = ours, plain(config, state, ids, targets, dtype)
            found.append(
                [math.hypot(*(distance(each[name].double(), exact[name]) for name in ours)) for each in results]
            )
        return found

    for found in launch(fn, 2):
        for (ours, usual), step in zip(found, (2**-8, 2**-8, 2**-23), strict=True):
            assert step / 100 < ours <= 1.5 * usual


def test_microbatches_add_up():
    """Two backwards, each divided by the tokens of both, sum what is replicated once or twice: the same gradient."""
    config = LlamaConfig(**SIZES, num_heads=4, num_kv_heads=1)
    ids, targets = batch(37)
    num_tokens = int((targets != -100).sum())

    def fn(rank, world_size):
        found = []
        for coalesce in (False, True):
            model = Llama(config, lab.Topology([("tp", 2)]), True, coalesce=coalesce, dtype=torch.float64)
            expected = plain(config, full_state_dict(model, model.tp.group), ids, targets)
            for row in range(BATCH):
                model.loss(ids[row : row + 1], targets[row : row + 1], num_tokens=num_tokens).backward()
            sum_partial_gradients(model)
            grads = full_state_dict(model, of="grad")
            found.append(max(distance(grads[name], expected[name]) for name in grads))
        return found

    for found in launch(fn, 2):
        assert max(found) < 1e-12
