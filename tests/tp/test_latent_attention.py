"""Latent attention cut over heads: raw gradients beside transformers' module, its messages, refusals."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from runs import counted, draw, launch, leaf
from tp_runs import assert_a1, attention_step, distances, local, modes

import dualpipe_lab as lab
from dualpipe_lab.cp.closed_forms import AttentionSizes, latent_sent_bytes, sent_bytes
from dualpipe_lab.cp.latent_ring import LatentRing
from dualpipe_lab.cp.layouts import LAYOUTS, make_layout
from dualpipe_lab.cp.ring_attention import ring_attention
from dualpipe_lab.cp.sequence import positions, shard_sequence
from dualpipe_lab.dp import DDP, Zero1, Zero3
from dualpipe_lab.tp.latent_attention import LatentAttention, LatentSizes
from dualpipe_lab.tp.rope import rope_cos_sin
from dualpipe_lab.tp.shard import TensorParallel, full_state_dict, load_full_state_dict

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


@pytest.mark.parametrize(("cp_size", "tp_size"), [(2, 2), (3, 1)])
def test_it_attends_round_a_ring(cp_size, tp_size):
    """Keys and values, filled up to the size of keys, or latents travel; the gradients of the weights are summed."""
    sizes, whole = SIZES["v3"], state(SIZES["v3"])
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


def test_a_layer_sends_what_its_ring_is_told_to():
    """cp 2 x tp 2, exactly: 7 numbers of latents, or 2 heads x 2 x 6 of keys and values; and what tp adds."""
    sizes, layout = SIZES["v3"], make_layout("zigzag", TOKENS, 2)

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("cp", 2), ("tp", 2)]))
        tp, found = TensorParallel(mesh.group("tp")), {}
        for sends in ("keys", "latents", "auto"):
            attend = LatentRing(layout, mesh.group("cp"), sends)
            layer = LatentAttention(HIDDEN, HEADS, sizes, tp=tp, attend=attend, dtype=torch.float64)
            load_full_state_dict(layer, state(sizes))
            x = leaf(draw(20, BATCH, TOKENS // 2, HIDDEN))
            outputs = []
            forward = counted(lambda layer=layer, x=x, outputs=outputs: outputs.append(layer(x)))
            backward = counted(lambda outputs=outputs: outputs[0].sum().backward())
            found[sends] = [
                sum(sent for name, (_, sent) in part.items() if name != "all_reduce") for part in (forward, backward)
            ]
        return found

    heads = HEADS // 2
    keys = sent_bytes("ring", layout, 0, AttentionSizes(BATCH, heads, heads, sizes.key, 8, 8))
    latents = latent_sent_bytes(sizes, layout, 0, BATCH, 8, 8)
    assert latents == (BATCH * 6 * 7 * 8, BATCH * 18 * 7 * 8)
    for found in launch(fn, 4):
        assert found == {"keys": list(keys), "latents": list(latents), "auto": list(latents)}


def test_wide_values_go_round_a_ring_as_latents():
    """Keys and values of one size would need padded keys; a latent has neither."""
    sizes, whole = SIZES["wide values"], state(SIZES["wide values"])
    x, dy = draw(20, BATCH, TOKENS, HIDDEN), draw(21, BATCH, TOKENS, HIDDEN)
    expected = reference(x, whole, dy, torch.arange(TOKENS), sizes)

    def fn(rank, world_size):
        cut, tp = make_layout("striped", TOKENS, 2), TensorParallel(lab.Mesh(lab.Topology([("cp", 2)])).group("tp"))
        with pytest.raises(ValueError, match="use value of at most content"):
            LatentAttention(HIDDEN, HEADS, sizes, tp=tp, attend=LatentRing(cut, sends="keys"))
        attend = LatentRing(cut, sends="latents")
        layer = LatentAttention(HIDDEN, HEADS, sizes, tp=tp, rope_base=100.0, attend=attend, dtype=torch.float64)
        load_full_state_dict(layer, whole)
        step = attention_step(layer, shard_sequence(x, cut, rank), shard_sequence(dy, cut, rank), positions(cut, rank))
        for weight in whole:
            lab.comm.all_reduce(step[weight])
        return {
            "wide": distances(step, expected | {key: shard_sequence(expected[key], cut, rank) for key in ("y", "dx")})
        }

    assert_a1(launch(fn, 2))


@pytest.mark.parametrize(("zero", "coalesce"), [(DDP, True), (Zero1, False), (Zero3, True)], ids=str)
def test_an_optimizer_over_a_mesh_knows_its_copies_and_shards(zero, coalesce):
    """dp 2 x tp 2 under sequence parallelism: the norm, and the weights after a clipped step of AdamW."""
    sizes, whole = SIZES["v3"], state(SIZES["v3"])
    x, dy = draw(20, 2 * BATCH, TOKENS, HIDDEN), draw(21, 2 * BATCH, TOKENS, HIDDEN)
    gradients = reference(x, whole, dy, torch.arange(TOKENS), sizes)
    plain = {name: value.clone().requires_grad_() for name, value in whole.items()}
    for name, value in plain.items():
        value.grad = gradients[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.5)
    torch.optim.AdamW(plain.values(), lr=1e-2, weight_decay=0.01).step()

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("dp", 2), ("tp", 2)]))
        tp = TensorParallel(mesh.group("tp"), sequence_parallel=True, coalesce=coalesce)
        layer = LatentAttention(HIDDEN, HEADS, sizes, tp=tp, rope_base=100.0, dtype=torch.float64)
        load_full_state_dict(layer, whole)
        units = {"units": []} if zero is Zero3 else {}
        optimizer = zero(layer, mesh, **units, lr=1e-2)
        optimizer.zero_grad()
        own = slice(mesh.rank("dp") * BATCH, (mesh.rank("dp") + 1) * BATCH)
        layer(local(x[own], 1, tp)).backward(local(dy[own], 1, tp))
        found = optimizer.step(max_norm=0.5).norm
        with getattr(optimizer, "gathered", nullcontext)():
            after = full_state_dict(layer, tp.group)
        right = {name: value.detach() for name, value in plain.items()} | {"norm": norm.detach()}
        return {"step": distances(after | {"norm": torch.tensor(found, dtype=torch.float64)}, right)}

    assert_a1(launch(fn, 4), limit=1e-10)


def test_its_messages_are_those_of_the_latents():
    """Forward: y; backward: dc_q, dc_kv and the shared key.  Under sequence parallelism halves of the same."""
    sizes = SIZES["v3"]
    latents = sizes.query_rank + sizes.cached

    def fn(rank, world_size):
        found = []
        for sequence_parallel in (False, True):
            tp = TensorParallel(sequence_parallel=sequence_parallel, regather=False)
            layer = LatentAttention(HIDDEN, HEADS, sizes, tp=tp, dtype=torch.float64)
            load_full_state_dict(layer, state(sizes))
            x = leaf(local(draw(20, BATCH, TOKENS, HIDDEN), 1, tp, sequence_parallel))
            forward = counted(lambda layer=layer, x=x: layer(x))
            y = layer(x)
            backward = counted(lambda y=y: y.sum().backward())
            found.append([sum(sent for _, sent in part.values()) for part in (forward, backward)])
        return found

    tokens = BATCH * TOKENS * 8  # float64
    weights = 8 * (sizes.query_rank * (HIDDEN + 1) + sizes.cached * HIDDEN + sizes.kv_rank)  # summed over the tokens
    for (forward, backward), (gathered, scattered) in launch(fn, 2):
        assert forward == tokens * HIDDEN
        assert backward == tokens * latents
        assert gathered == tokens * (HIDDEN + latents) // 2
        assert scattered == tokens * (HIDDEN + latents) // 2 + weights


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


def test_a_cache_of_deepseek_v3_has_576_numbers_per_token():
    """In place of 2 x 128 heads x 128 features (quoted: arXiv 2405.04434, table 1, has 9/2 of a head)."""
    assert LatentSizes().cached == 576 == 9 * 128 // 2
