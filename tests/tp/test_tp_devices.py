"""On a device of its own, a rank's layers make their parameters there, and send nothing that lies elsewhere."""

import pytest
import torch
from llama_runs import SIZES, TOKENS
from runs import assert_a1, devices_sent, distances, draw, launch

import dualpipe_lab as lab
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.grads import sum_partial_gradients
from dualpipe_lab.tp.linear import ColumnParallelLinear, RowParallelLinear
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import full_state_dict

pytestmark = [pytest.mark.on_gloo("each launch names its back end"), pytest.mark.usefixtures("on_stand_in")]


def test_a_model_with_every_layer_computes_on_the_device_what_it_computes_on_the_cpu():
    """Shared KV heads, norms of queries and keys, a tied table; whole and sharded tokens, partial gradients."""
    config = LlamaConfig(**SIZES, num_heads=4, num_kv_heads=1, qk_norm=True, tied=True)
    ids = torch.arange(TOKENS)[None] % SIZES["vocabulary_size"]

    def fn(rank, world_size, ids):
        sent, places, found = devices_sent(), set(), {}
        for is_sharded in (False, True):
            model = Llama(config, lab.Topology([("tp", world_size)]), is_sharded, coalesce=True, dtype=torch.float64)
            loss = model.loss(ids, ids.flip(-1))
            loss.backward()
            sum_partial_gradients(model)
            places |= set().union(*sent.values())
            places |= {parameter.grad.device.type for parameter in model.parameters()}
            grads = full_state_dict(model, model.tp.group, "grad")  # whose spans travel as objects, over the CPU
            sent.clear()
            found |= {(name, is_sharded): grad for name, grad in grads.items()} | {("loss", is_sharded): loss.detach()}
        return places, found

    expected, here = launch(fn, 2, ids), launch(fn, 2, ids, backend="nccl")
    for (_, cpu), (places, device) in zip(expected, here, strict=True):
        assert places == {"cuda"}
        assert_a1([{"device": distances(device, cpu)}])


def test_layers_move_between_the_full_layer_of_a_cpu_and_shards_of_a_device():
    def fn(rank, world_size, weight):
        column = ColumnParallelLinear.from_full(full_linear(weight))
        row = RowParallelLinear(5, 4, dtype=torch.float64)
        table = VocabParallelEmbedding(7, 4, dtype=torch.float64)
        layers = column, row, table, *(RMSNorm(4, sharded=sharded) for sharded in ("none", "tokens", "hidden"))
        places = {tensor.device.type for layer in layers for tensor in layer.parameters()}
        wholes = [full_state_dict(layer) for layer in (column, row, table)]
        places |= {tensor.device.type for whole in wholes for tensor in whole.values()}
        return places, wholes[0]["weight"]

    weight = draw(0, 5, 3)
    for places, back in launch(fn, 2, weight, backend="nccl"):
        assert places == {"cuda"}
        assert torch.equal(back, weight)


def full_linear(weight):
    full = torch.nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    full.weight.data = weight.cpu()
    return full
