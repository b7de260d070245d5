"""On a device of its own, a rank's layers make their parameters there, and send nothing that lies elsewhere."""

import pytest
import torch
from llama_runs import SIZES, TOKENS
from runs import assert_a1, devices_sent, distances, launch

import dualpipe_lab as lab
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.tp.grads import sum_partial_gradients
from dualpipe_lab.tp.linear import ColumnParallelLinear
from dualpipe_lab.tp.shard import full_state_dict

pytestmark = [pytest.mark.on_gloo("each launch names its back end"), pytest.mark.usefixtures("on_stand_in")]


def test_a_model_with_every_layer_computes_on_the_device_what_it_computes_on_the_cpu():
    """Shared KV heads, norms of queries and keys, a tied table; whole and sharded tokens, partial gradients."""
    config = LlamaConfig(**SIZES, num_heads=4, num_kv_heads=1, qk_norm=True, tied=True)
    ids = torch.arange(TOKENS)[None] % SIZES["vocabulary_size"]

    def fn(rank, world_size, ids):
        full = torch.nn.Linear(3, 5, dtype=torch.float64).cpu()
        full.weight.data = torch.arange(15.0, dtype=torch.float64).view(5, 3).cpu()
        column = ColumnParallelLinear.from_full(full)
        found = {"column": full_state_dict(column)["weight"]}  # whose spans travel as objects, over the CPU
        sent, places = devices_sent(), {column.weight.device.type}
        assert torch.equal(found["column"].cpu(), full.weight)
        for is_sharded in (False, True):
            model = Llama(config, lab.Topology([("tp", world_size)]), is_sharded, coalesce=True, dtype=torch.float64)
            loss = model.loss(ids, ids.flip(-1))
            loss.backward()
            sum_partial_gradients(model)
            places |= set().union(*sent.values())
            places |= {parameter.grad.device.type for parameter in model.parameters()}
            grads = full_state_dict(model, model.tp.group, "grad")
            sent.clear()
            found |= {(name, is_sharded): grad for name, grad in grads.items()} | {("loss", is_sharded): loss.detach()}
        return places, found

    expected, here = launch(fn, 2, ids), launch(fn, 2, ids, backend="nccl")
    for (_, cpu), (places, device) in zip(expected, here, strict=True):
        assert places == {"cuda"}
        assert_a1([{"device": distances(device, cpu)}])
