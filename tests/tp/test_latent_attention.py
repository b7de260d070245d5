"""Latent attention cut over heads: raw gradients beside transformers' module, its messages, refusals."""

from functools import partial
from itertools import product

import pytest
import torch
from runs import assert_a1, distances, draw, launch, leaf
from tp_runs import attention_step, local, modes

import dualpipe_lab as lab
from dualpipe_lab.cp.latent_ring import LatentRing
from dualpipe_lab.cp.layouts import LAYOUTS, make_layout
from dualpipe_lab.cp.ring_attention import ring_attention
from dualpipe_lab.cp.sequence import positions, shard_sequence
from dualpipe_lab.tp.latent_attention import LatentAttention, LatentSizes
from dualpipe_lab.tp.rope import rope_cos_sin
from dualpipe_lab.tp.shard import TensorParallel, load_full_state_dict

BATCH, TOKENS, HIDDEN, HEADS = 2, 12, 10, 4
SIZES = {
    "v3": LatentSizes(query_rank=6, kv_rank=5, content=4, position=2, value=3),
    "no query latent": LatentSizes(query_rank=None, kv_rank=5, content=2, position=4, value=3),
    "wide values": LatentSizes(query_rank=6, kv_rank=4, content=2, position=2, value=7),
}
THEIRS = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "o": "o_proj",
}


def theirs(name, sizes):
    """The name in DeepSeek's files."""
    layer, _, rest = name.partition(".")
    return "q_proj.weight" if layer == "q_up" and sizes.query_rank is None else f"{THEIRS[layer]}.{rest}"


def state(sizes):
    down, up = sizes.query_rank or HIDDEN, HEADS * sizes.key
    shapes = {} if sizes.query_rank is None else {"q_down.weight": (down, HIDDEN), "q_norm.weight": (down,)}
    shapes |= {
        "q_up.weight": (up, down),
        "kv_down.weight": (sizes.cached, HIDDEN),
        "kv_norm.weight": (sizes.kv_rank,),
        "kv_up.weight": (HEADS * (sizes.content + sizes.value), sizes.kv_rank),
        "o.weight": (HIDDEN, HEADS * sizes.value),
    }
    return {name: draw(number, *shape) for number, (name, shape) in enumerate(shapes.items())}


def reference(x, whole, dy, positions, sizes):
    """Output and gradients of transformers' module; its norms, which compute in float32, in float64."""
    import transformers  # here, because it takes a second of every collection
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        q_lora_rank=sizes.query_rank,
        kv_lora_rank=sizes.kv_rank,
        qk_nope_head_dim=sizes.content,
        qk_rope_head_dim=sizes.position,
        v_head_dim=sizes.value,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    module = DeepseekV3Attention(config, 0).double()
    for norm in (module.q_a_layernorm, module.kv_a_layernorm):
        if norm is not None:
            norm.forward = lambda x, norm=norm: torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, 1e-6)
    names = {theirs(name, sizes): name for name in whole}
    module.load_state_dict({name: whole[ours] for name, ours in names.items()})
    angles = [torch.cat((part, part), -1)[None] for part in rope_cos_sin(positions, sizes.position, 100.0, x.dtype)]
    x = leaf(x)
    y = module(x, tuple(angles), None)[0]
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {names[n]: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.every)])
def test_it_equals_the_module_of_transformers(world_size, kind):
    sizes, whole = SIZES[kind], state(SIZES[kind])
    x, dy = draw(20, BATCH, TOKENS, HIDDEN), draw(21, BATCH, TOKENS, HIDDEN)
    positions = torch.arange(TOKENS) + 7
    expected = reference(x, whole, dy, positions, sizes)

    def fn(rank, world_size):
        found = {}
        for name, tp in (modes() | {"coalesced": TensorParallel(coalesce=True, sequence_parallel=True)}).items():
            layer = LatentAttention(HIDDEN, HEADS, sizes, tp=tp, rope_base=100.0, dtype=torch.float64)
            load_full_state_dict(layer, whole)
            own = {key: local(expected[key], 1, tp, tp.sequence_parallel) for key in ("y", "dx")}
            found[name] = distances(attention_step(layer, x, dy, positions), expected | own)
        return found

    assert_a1(launch(fn, world_size))


RINGS = {"plain": {}, "sequence": {"sequence_parallel": True}, "kept": {"sequence_parallel": True, "regather": False}}


@pytest.mark.parametrize(("kind", "cp_size", "tp_size"), [("v3", 2, 2), ("v3", 3, 1), ("wide values", 2, 1)])
def test_it_attends_round_a_ring(kind, cp_size, tp_size):
    """Keys and values, filled up to the size of keys, or latents travel; the gradients of the weights are summed.

    Keys and values of one size would need padded keys where values are wider; a latent has neither.
    """
    sizes, whole = SIZES[kind], state(SIZES[kind])
    tokens = 2 * TOKENS
    x, dy = draw(20, BATCH, tokens, HIDDEN), draw(21, BATCH, tokens, HIDDEN)
    expected = reference(x, whole, dy, torch.arange(tokens), sizes)

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("cp", cp_size), ("tp", tp_size)]))
        own, group = mesh.rank("cp"), mesh.group("cp")
        found = {}
        for name, sends, mode in product(LAYOUTS, ("function", "keys", "latents", "auto"), RINGS):
            if tp_size == 1 and mode != "plain":
                continue
            cut = make_layout(name, tokens, cp_size)
            attend = partial(ring_attention, layout=cut, group=group)
            attend = attend if sends == "function" else LatentRing(cut, group, sends)
            tp = TensorParallel(mesh.group("tp"), **RINGS[mode])
            if kind == "wide values" and sends in ("function", "keys"):
                with pytest.raises(ValueError, match="use value of at most content"):
                    LatentAttention(HIDDEN, HEADS, sizes, tp=tp, attend=attend)
                continue
            layer = LatentAttention(HIDDEN, HEADS, sizes, tp=tp, rope_base=100.0, attend=attend, dtype=torch.float64)
            load_full_state_dict(layer, whole)
            step = attention_step(layer, shard_sequence(x, cut, own), shard_sequence(dy, cut, own), positions(cut, own))
            for weight in whole:  # summands of the ranks with other tokens
                lab.comm.all_reduce(step[weight], group=group)
            right = {
                key: local(shard_sequence(expected[key], cut, own), 1, tp, tp.sequence_parallel) for key in ("y", "dx")
            }
            found[f"{name}, {sends}, {mode}"] = distances(step, expected | right)
        return found

    assert_a1(launch(fn, cp_size * tp_size))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position": 3}, "position=3; use an even one"),
        ({"kv_rank": 0}, "count from 1"),
        ({"query_rank": 0, "value": 0}, "count from 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        LatentSizes(**change).check()
