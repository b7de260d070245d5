"""The sum of dx travels while dW is computed, in model time: exact on every machine; what is kept for that."""

import pytest
import torch
from runs import draw, launch, leaf
from tp_runs import kept_bytes, modes

import dualpipe_lab as lab
from dualpipe_lab.models.llama import LlamaLayer
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.tp import linear as products
from dualpipe_lab.tp.closed_forms import layer_kept_numbers
from dualpipe_lab.tp.gqa import causal_attention, kv_replicas
from dualpipe_lab.tp.linear import ColumnParallelLinear

TOKENS, WIDTH, PRODUCT, MESSAGE = 10, 100, 20, 6  # ms; a message is half of dx's 4,000 bytes
LINK = lab.Link(gbps=TOKENS * WIDTH * 4 / 2 * 8 / (MESSAGE * 1e6), latency_ms=0)


def test_a_backward_takes_as_long_as_its_work_and_what_does_not_fit_beside_it():
    def fn(rank, world_size):
        weight_grad = products.weight_grad
        products.weight_grad = lambda grad, x: (lab.compute(PRODUCT), weight_grad(grad, x))[1]
        found = {}
        for name, tp in modes().items():
            layer = ColumnParallelLinear(WIDTH, 8, bias=False, tp=tp)
            y = layer(leaf(torch.ones(TOKENS // (world_size if tp.sequence_parallel else 1), WIDTH)))
            began = lab.now()
            y.backward(torch.ones_like(y))
            found[name] = (lab.now() - began) / 1e6
        return found

    sum_of_dx, half = 2 * MESSAGE, MESSAGE  # an all-reduce is a reduce-scatter and a gather
    expected = {
        "plain": PRODUCT,
        "in turn": PRODUCT + sum_of_dx,
        "sequence": half + PRODUCT,  # x is gathered again, beside dx, which takes no model time here
        "sequence, kept": PRODUCT,
    }
    for found in launch(fn, 2, clock="virtual", link=LINK):
        assert found == {name: pytest.approx(value) for name, value in expected.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_layer_keeps_what_the_closed_form_says(world_size):
    config = LlamaConfig(hidden_size=16, ffn_size=24, num_heads=4, num_kv_heads=2, head_size=6)
    batch, tokens = 2, 12

    def fn(rank, world_size):
        found = {}
        for name, tp in modes().items():
            layer = LlamaLayer(config, tp, kv_replicas(2, tp), causal_attention, torch.float64)
            x = leaf(draw(1, batch, tokens // (world_size if tp.sequence_parallel else 1), 16))
            found[name] = kept_bytes(lambda layer=layer, x=x: layer(x), layer) / 8
        return found

    sizes = (16, 24, 4, 2, 6)
    expected = {
        name: layer_kept_numbers((batch, tokens), sizes, world_size, *how)
        for name, how in {
            "plain": (False,),
            "in turn": (False,),
            "sequence": (True,),
            "sequence, kept": (True, False),
        }.items()
    }
    assert launch(fn, world_size) == [expected] * world_size
