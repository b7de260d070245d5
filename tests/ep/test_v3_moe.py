"""The whole V3-style model: loss, gradients and biases of one process on every topology; refusals; recomputation."""

from dataclasses import replace

import pytest
import torch
from runs import A1, distances, launch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.dp.data_parallel import num_valid_tokens
from dualpipe_lab.dp.param_specs import ModelSpec
from dualpipe_lab.ep.deepseek_moe import bias_step
from dualpipe_lab.models.plain_v3_moe import PlainV3MoE
from dualpipe_lab.models.stage import check_topology
from dualpipe_lab.models.v3_moe import V3MoE
from dualpipe_lab.models.v3_moe_config import V3MoEConfig

CONFIG = V3MoEConfig(
    vocabulary_size=29, hidden_size=12, num_layers=3, num_heads=2, num_kv_heads=1, ffn_size=20, expert_ffn_size=6,
    balance=0.3,
)  # fmt: skip
ROWS, LENGTH = 4, 8
TOPOLOGIES = {
    "one": lab.Topology([("dp", 1)]),
    "ep 2": lab.Topology([("ep", 2)]),
    "ep 4": lab.Topology([("ep", 4)]),
    "dp 2 x ep 2": lab.Topology([("dp", 2), ("ep", 2)]),
    "ep 2 x dp 2": lab.Topology([("ep", 2), ("dp", 2)]),
    "dp 4, edp 2": lab.Topology([("dp", 4)], edp=2),
    "dp 2": lab.Topology([("dp", 2)]),
    "ep 2 x tp 2": lab.Topology([("ep", 2), ("tp", 2)]),
    "dp 2 x cp 2, edp 2": lab.Topology([("dp", 2), ("cp", 2)], edp=2, experts_over=("dp", "cp")),
}


def batch():
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(29, (2, ROWS, LENGTH), generator=generator)
    targets[0, :4] = -100  # the first rank has fewer targets than the others
    targets[1] = -100
    return ids, targets


def biases(place, count):
    return 0.5 * torch.randn(count, generator=torch.Generator().manual_seed(place), dtype=torch.float64)


def routers(model):
    return [layer.mlp.router for layer in model.layers if hasattr(layer.mlp, "router")]


def plain(config, state):
    model = PlainV3MoE(config, torch.float64)
    model.load_state_dict(state)
    for place, router in enumerate(routers(model)):
        router.selection_bias = biases(place, config.num_experts)
    loss = model.loss(*batch())
    loss.backward()
    grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    return {"loss": loss.detach(), "norm": norm} | grads


def step(mesh, config, layout=None, is_sequence_parallel=False, **options):
    """Two microbatches of a step, where there are rows for two."""
    options |= {"layout": layout, "sequence_parallel": is_sequence_parallel}
    model = V3MoE(config, mesh, dtype=torch.float64, **options)
    for place, router in enumerate(routers(model)):
        router.bias.copy_(biases(place, config.num_experts))
    state = model.full_state_dict()
    axes = [axis for axis in ("dp", "ep") if axis in mesh.topology.names]
    rows, number = ROWS, 0
    for axis in axes:
        rows //= mesh.topology.size(axis)
        number = number * mesh.topology.size(axis) + mesh.rank(axis)
    ids, targets = (tensor[number * rows :][:rows] for tensor in batch())
    if layout is not None:
        ids, targets = (shard_sequence(tensor, layout, mesh.rank("cp")) for tensor in (ids, targets))
    num_tokens, total = num_valid_tokens(targets, model.data), torch.zeros((), dtype=torch.float64)
    for part, goal in zip(ids.tensor_split(min(rows, 2)), targets.tensor_split(min(rows, 2)), strict=True):
        loss = model.loss(part, goal, num_tokens, ROWS)
        loss.backward()
        total += loss.detach()
    comm.all_reduce(total, group=model.data)
    model.reduce_gradients()
    loads = model.update_biases(0.01)
    norm = torch.tensor(ModelSpec(model, mesh).gradient_norm(), dtype=torch.float64)
    found = {"loss": total, "norm": norm} | model.full_state_dict("grad")
    return state, found, loads, [router.bias.clone() for router in routers(model)]


VARIANTS = [  # topology, config, options: what the others would refute, too
    *((name, {}, {}) for name in ("dp 2 x ep 2", "ep 2 x dp 2", "dp 4, edp 2", "dp 2 x cp 2, edp 2")),
    ("ep 2 x tp 2", {}, {"is_sequence_parallel": True}),
    ("ep 4", {}, {"num_nodes": 2}),
    ("ep 2", {"num_shared_experts": 0, "num_dense_layers": 0}, {}),
    ("ep 2", {"num_dense_layers": 3}, {}),
    *(pytest.param(name, {}, {}, marks=pytest.mark.every) for name in ("one", "ep 2", "ep 4", "dp 2", "ep 2 x tp 2")),
]


@pytest.mark.parametrize(("name", "changes", "options"), VARIANTS)
def test_loss_gradients_and_biases_are_those_of_one_process(name, changes, options):
    topology, config = TOPOLOGIES[name], replace(CONFIG, **changes)
    layout = make_layout("zigzag", 8, 2) if topology.size("cp") > 1 else None

    def fn(rank, world_size):
        torch.manual_seed(rank)
        state, found, loads, moved = step(lab.Mesh(topology), config, layout, **options)
        return distances(found, plain(config, state)), [load.tolist() for load in loads], moved

    results = launch(fn, topology.world_size)
    for far, loads, moved in results:
        assert {key: value for key, value in far.items() if value > A1} == {}
        assert loads == results[0][1]
        assert len(loads) == config.num_layers - config.num_dense_layers
        for place, (load, bias) in enumerate(zip(loads, moved, strict=True)):
            assert sum(load) == ROWS * LENGTH * 2
            assert torch.equal(bias, biases(place, 8) + bias_step(torch.tensor(load), 0.01))


def test_recomputation_counts_no_load_twice_and_changes_no_bit():
    def fn(rank, world_size):
        return [step(lab.Mesh(TOPOLOGIES["ep 2"]), CONFIG, recompute=again)[1:] for again in (False, True)]

    for kept, again in launch(fn, 2):
        assert all(torch.equal(again[0][name], value) for name, value in kept[0].items())
        assert [load.tolist() for load in kept[1]] == [load.tolist() for load in again[1]]


def test_every_cut_starts_from_the_same_numbers():
    def fn(rank, world_size, topology):
        torch.manual_seed(rank)
        return V3MoE(CONFIG, topology, seed=3).full_state_dict()

    alone = launch(fn, 1, TOPOLOGIES["one"])[0]
    for found in launch(fn, 4, TOPOLOGIES["ep 2 x tp 2"]):
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[key], alone[key]) for key in alone)
    assert not torch.equal(alone["layers.1.mlp.experts.gate"], alone["layers.2.mlp.experts.gate"])


DP_CP = lab.Topology([("dp", 2), ("cp", 2)], edp=2)


@pytest.mark.parametrize(
    ("changes", "topology", "layout", "message"),
    [
        ({}, lab.Topology([("ep", 3)]), None, "experts must divide among the ranks, got 8 experts on 3 ranks"),
        ({}, lab.Topology([("pp", 2), ("ep", 2)]), None, "got pp 2 in pp 2 x ep 2 = 4 ranks"),
        ({"num_groups_per_token": 1, "num_experts_per_token": 3}, TOPOLOGIES["ep 2"], None, "a token needs 3"),
        ({"num_dense_layers": 4}, TOPOLOGIES["ep 2"], None, "dense layers are some of the layers"),
        ({}, lab.Topology([("cp", 2)]), None, "got layout=None"),
        ({"num_heads": 3}, lab.Topology([("tp", 2)]), None, "num_heads must divide among the ranks, got 3 on 2"),
        ({}, DP_CP, make_layout("zigzag", 8, 2), "edp counts all replicas"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_process_starts(changes, topology, layout, message):
    with pytest.raises(ValueError, match=message):
        check_topology(replace(CONFIG, **changes), topology, layout)
