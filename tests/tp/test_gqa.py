"""Grouped attention cut over heads: raw gradients, copies of KV heads, rotary positions, its messages, refusals."""

import pytest
import torch
from runs import assert_a1, distances, draw, launch, leaf
from torch.nn import functional
from tp_runs import attention_step, local, modes

from dualpipe_lab.tp.closed_forms import check_heads
from dualpipe_lab.tp.gqa import GroupedQueryAttention
from dualpipe_lab.tp.shard import TensorParallel, load_full_state_dict

BATCH, TOKENS, HIDDEN, HEAD = 2, 12, 10, 4


def turned(x, positions, base=10_000.0):
    """Rotary positions by complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def state(num_heads, num_kv_heads, qk_norm=False):
    shapes = {
        "q.weight": (num_heads * HEAD, HIDDEN),
        "k.weight": (num_kv_heads * HEAD, HIDDEN),
        "v.weight": (num_kv_heads * HEAD, HIDDEN),
        "o.weight": (HIDDEN, num_heads * HEAD),
    }
    shapes |= {"q_norm.weight": (HEAD,), "k_norm.weight": (HEAD,)} if qk_norm else {}
    return {name: draw(number, *shape) for number, (name, shape) in enumerate(shapes.items())}


def plain(x, whole, dy, positions):
    """Output and all gradients of the whole layer, by torch."""
    x, weights = leaf(x), {name: leaf(value) for name, value in whole.items()}
    q, k, v = ((x @ weights[f"{name}.weight"].t()).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in "qkv")
    if "q_norm.weight" in weights:
        q, k = (functional.rms_norm(y, (HEAD,), weights[f"{n}_norm.weight"], 1e-6) for y, n in ((q, "q"), (k, "k")))
    q, k = turned(q, positions), turned(k, positions)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y = mixed.transpose(1, 2).flatten(2) @ weights["o.weight"].t()
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: value.grad for name, value in weights.items()}


HEADS = {1: [(4, 2), (3, 1)], 3: [(6, 3), (3, 1)], 4: [(8, 2)]}


@pytest.mark.parametrize("world_size", HEADS)
def test_it_equals_plain_torch(world_size):
    """Also with more ranks than KV heads: 4 ranks share 2 KV heads, 3 ranks one."""
    x, dy = draw(20, BATCH, TOKENS, HIDDEN), draw(21, BATCH, TOKENS, HIDDEN)

    def fn(rank, world_size):
        found = {}
        settings = modes() | {"coalesced": TensorParallel(coalesce=True, sequence_parallel=True)}
        for heads in HEADS[world_size]:
            for name, tp in settings.items():
                for qk_norm in (False, True) if name in ("plain", "coalesced") else (False,):
                    positions = torch.arange(TOKENS) + 7 * qk_norm
                    expected = plain(x, state(*heads, qk_norm), dy, positions)
                    expected |= {key: local(expected[key], 1, tp, tp.sequence_parallel) for key in ("y", "dx")}
                    layer = GroupedQueryAttention(HIDDEN, *heads, HEAD, tp=tp, qk_norm=qk_norm, dtype=torch.float64)
                    load_full_state_dict(layer, state(*heads, qk_norm))
                    results = attention_step(layer, x, dy, positions if qk_norm else None)
                    found[heads, name, qk_norm] = distances(results, expected)
                    replicas = {id(weight) for weight in layer.partial}
                    assert bool(replicas) == (tp.coalesce and tp.size > heads[1])
        return found

    assert_a1(launch(fn, world_size))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((30, 4, 4, 1), "hidden_size must divide by num_heads, got 30 and 4"),
        ((12, 4, 4, 1), "need an even head_size, got 3"),
        ((24, 6, 4, 1), "serves as many query heads, got 6 for 4 KV heads"),
        ((24, 6, 3, 4), "num_heads must divide among the ranks, got 6 on 4 ranks"),
        ((24, 12, 6, 4), "or ranks among KV heads, got 6 heads on 4 ranks"),
    ],
)
def test_heads_that_do_not_divide_are_refused_without_a_rank(sizes, message):
    with pytest.raises(ValueError, match=message):
        check_heads(*sizes)
