"""SwiGLU cut over ranks: against the oracle and plain torch; one sum each way; what is kept for the backward."""

import pytest
import torch
from runs import RANKS, assert_a1, distances, draw, launch, leaf
from torch.nn import functional
from tp_runs import TOKENS, local, modes, oracle, step, tensor

import dualpipe_lab as lab
from dualpipe_lab.tp.shard import TensorParallel
from dualpipe_lab.tp.swiglu import SwiGLU

NAMES = ("gate.weight", "up.weight", "down.weight")


def plain(x, weights, dy):
    """Output and all gradients, by torch's autograd."""
    x, (gate, up, down) = leaf(x), [leaf(weight) for weight in weights]
    y = (functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | dict(zip(NAMES, (gate.grad, up.grad, down.grad), strict=True))


@pytest.mark.parametrize("world_size", RANKS)
def test_it_equals_plain_torch_and_the_oracle(world_size):
    """4 inner features on 3 ranks leave the last one with none; 7 are cut into 3 3 1."""

    def fn(rank, world_size):
        found = {}
        for name, tp in modes().items():
            cut = tp.sequence_parallel
            for ffn, shape in ((4, (TOKENS,)), (7, (2, TOKENS))):
                weights = draw(1, ffn, 4), draw(2, ffn, 4), draw(3, 4, ffn)
                x, dy = draw(4, *shape, 4), draw(5, *shape, 4)
                expected = plain(x, weights, dy)
                expected |= {key: local(expected[key], -2, tp, cut) for key in ("y", "dx")}
                part = local(x, -2, tp, cut), local(dy, -2, tp, cut)
                found[name, ffn] = distances(step(SwiGLU.from_full(*weights, tp), *part), expected)
                packed = SwiGLU.from_packed(torch.cat(weights[:2]), weights[2], tp)
                found[name, ffn, "packed"] = distances(step(packed, *part), expected)
        block = oracle("swiglu")
        expected = {name: tensor(value) for name, value in block["expected"].items()}
        names = dict(zip(("dWg", "dWu", "dWd"), NAMES, strict=True))
        layer = SwiGLU.from_full(*(tensor(block[name]) for name in ("Wg", "Wu", "Wd")))
        results = step(layer, tensor(block["x"]), tensor(block["dy"]))
        found["oracle"] = distances(results, {names.get(name, name): value for name, value in expected.items()})
        return found

    assert_a1(launch(fn, world_size))


def test_an_odd_pack_is_refused():
    with pytest.raises(lab.RankError, match="as many rows of gate as of up, got 7"):
        launch(lambda rank, world_size: SwiGLU.from_packed(torch.ones(7, 2), torch.ones(2, 3), TensorParallel()), 1)
