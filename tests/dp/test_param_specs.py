"""One optimizer for a model with experts, on a mesh: gradients, norm, clip and weights of one process."""

import pytest
import torch
from runs import A1, launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.adam import AdamW
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.ema import ShardedEMA
from dualpipe_lab.dp.param_specs import copy_axes
from dualpipe_lab.dp.sharded import full_gradients, full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.ep.moe import Experts
from dualpipe_lab.models.plain_v3_moe import PlainV3MoE
from dualpipe_lab.models.v3_moe import V3MoE
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import TensorParallel

# one KV head, so that tp has replicas of it
CONFIG = V3MoEConfig(
    vocabulary_size=29, hidden_size=12, num_layers=2, num_heads=2, num_kv_heads=1, ffn_size=20, expert_ffn_size=6,
    num_experts=4, num_groups=2, balance=0.0,
)  # fmt: skip
# eps is large: else Adam would hide a gradient that is clipped too much
HYPER, MAX_NORM, STEPS, ROWS, LENGTH, DECAY = {"lr": 0.01, "eps": 0.1, "weight_decay": 0.1}, 0.5, 3, 4, 6, 0.6
STAGES = {"DDP": DDP, "Zero1": Zero1, "Zero2": Zero2, "Zero3": Zero3}
TOPOLOGIES = {
    "ep 2": lab.Topology([("ep", 2)]),
    "dp 2 x ep 2": lab.Topology([("dp", 2), ("ep", 2)]),
    "dp 4, edp 2": lab.Topology([("dp", 4)], edp=2),
    "ep 2 x tp 2": lab.Topology([("ep", 2), ("tp", 2)]),
    "dp 2 x tp 2": lab.Topology([("dp", 2), ("tp", 2)]),
}
NODES = {
    "dp 4 on 2 nodes, edp 2": lab.Topology([("dp", 4)], edp=2, ranks_per_node=2),
    "dp 2 x ep 2 on 2 nodes": lab.Topology([("dp", 2), ("ep", 2)], ranks_per_node=2),
    "ep 2 x dp 2 on 2 nodes": lab.Topology([("ep", 2), ("dp", 2)], ranks_per_node=2),
}


def batches():
    """One batch per step, of which the first rank has fewer targets."""
    found = []
    for seed in range(STEPS):
        ids, targets = torch.randint(29, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
        targets[0, :4] = -100
        found.append((ids, targets))
    return found


def one_process(state):
    """Gradients of the first step, all norms, the last weights and their moving average, by torch's clipping."""
    model, norms, grads = PlainV3MoE(CONFIG, torch.float64), [], {}
    model.load_state_dict(state)
    optimizer, average = AdamW(model.parameters(), **HYPER), {name: tensor.clone() for name, tensor in state.items()}
    for ids, targets in batches():
        optimizer.zero_grad()
        model.loss(ids, targets).backward()
        grads = grads or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        for name, parameter in model.named_parameters():
            average[name].mul_(DECAY).add_(parameter.detach(), alpha=1 - DECAY)
    assert min(norms) > 2 * MAX_NORM  # it does clip
    return grads, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}, average


def build(stage, model, mesh, options):
    return Zero3(model, mesh, units=list(model.layers), **options) if stage is Zero3 else stage(model, mesh, **options)


def rows_of(mesh):
    size, number = 1, 0
    for axis in ("dp", "ep"):
        if axis in mesh.topology.names:
            number, size = number * mesh.size(axis) + mesh.rank(axis), size * mesh.size(axis)
    return slice(number * ROWS // size, (number + 1) * ROWS // size)


def train(optimizer, mesh):
    """Two microbatches a step; the gradients of the first step, and all norms."""
    rows, norms, grads = rows_of(mesh), [], None
    averages = ShardedEMA(optimizer, DECAY)
    for ids, targets in batches():
        parts = list(zip(ids[rows].split(1), targets[rows].split(1), strict=True))
        optimizer.zero_grad(num_backwards=len(parts))
        for x, y in parts:
            optimizer.module.loss(x, y, int((targets != -100).sum()), ROWS).backward()
        grads = full_gradients(optimizer) if grads is None else grads
        asked = optimizer.grad_norm()
        norms.append(optimizer.step(max_norm=MAX_NORM).norm)
        assert asked == norms[-1]
        averages.update()
    with averages.applied():
        return grads, norms, full_weights(optimizer)


def worst(found, expected, declared):
    """The largest difference from this rank's parts of the full tensors, relative to the largest number of each."""
    off = 0.0
    for parameter, said in declared.items():
        name = said.name
        want = expected[name] if said.shard is None else said.shard.of(expected[name])
        assert said.shape == expected[name].shape
        if parameter.requires_grad and want.numel():
            off = max(off, float((found[name] - want).abs().max() / expected[name].abs().max()))
    return off


def compare(topology, hybrid=False):
    def fn(rank, world_size):
        mesh, found = lab.Mesh(topology), {}
        state = V3MoE(CONFIG, mesh, dtype=torch.float64).full_state_dict()
        expected_grads, expected_norms, expected, expected_average = one_process(state)
        for name, stage in STAGES.items():
            model = V3MoE(CONFIG, mesh, dtype=torch.float64)
            if mesh.rank("dp"):  # the optimizer makes copies equal
                nn.init.normal_(model.embedding.weight)
            if mesh.rank("edp" if topology.edp else "dp"):
                nn.init.normal_(model.layers[1].mlp.experts.gate)
            optimizer = build(stage, model, mesh, {**HYPER, "bucket_bytes": 3000, "hybrid": hybrid})
            grads, norms, averaged = train(optimizer, mesh)
            declared = optimizer.spec.parameters
            off = max(abs(norm / other - 1) for norm, other in zip(norms, expected_norms, strict=True))
            weights = worst(full_weights(optimizer), expected, declared)
            average = worst(averaged, expected_average, declared)
            found[name] = worst(grads, expected_grads, declared), off, weights, average
        return found

    for found in launch(fn, topology.world_size, timeout=400):
        assert found.keys() == STAGES.keys()
        assert max(max(off) for off in found.values()) < A1, found


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_gradients_norms_and_clipped_steps_are_those_of_one_process(name):
    compare(TOPOLOGIES[name])


@pytest.mark.parametrize("name", NODES)
def test_shards_within_nodes_and_replicas_across_them_too(name):
    compare(NODES[name], hybrid=True)


def refused(make):
    with pytest.raises(ValueError, match=r".+") as caught:
        make()
    return str(caught.value)


def test_what_cannot_be_right_is_refused():
    """On every rank alike, before anything is sent."""

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("dp", 2), ("ep", 2)]))
        piped = lab.Mesh(lab.Topology([("pp", 2), ("dp", 2)]))
        plain = nn.Linear(2, 2)
        experts = Experts(2, 2, 4)  # over the world, and the mesh has 2 ranks of ep
        norm = RMSNorm(4, tp=TensorParallel(coalesce=True), sharded="tokens")
        program = schedules.build("1f1b", 4, 4)
        looped = schedules.build("interleaved", 2, 4)
        return [
            refused(lambda: DDP(nn.Sequential(experts), mesh)),
            refused(lambda: DDP(nn.Sequential(norm), mesh)),
            refused(lambda: Zero1(plain, piped)),
            refused(lambda: Zero1(plain, piped, program=program)),
            refused(lambda: Zero1(plain, piped, program=looped)),
            refused(lambda: Zero2(plain, mesh, hybrid=True)),
        ]

    for rank, found in enumerate(launch(fn, 4)):
        first = 2 * (rank // 2)
        rules = [
            f"(Experts) is sharded over ranks [0, 1, 2, 3], and ep of dp 2 x ep 2 = 4 ranks has [{first}, {first + 1}]",
            f"(RMSNorm) leaves gradients partial over ranks [0, 1, 2, 3], and tp of dp 2 x ep 2 = 4 ranks has [{rank}]",
            "pp 2 x dp 2 = 4 ranks have a pipeline, whose program says which ranks hold a stage; give program=",
            "program '1F1B' is for 4 ranks, pp 2 x dp 2 = 4 has pp 2",
            "and Linear does not say which is which; give it `stages`",
            "hybrid ZeRO shards within nodes, got dp 2 x ep 2 = 4 ranks; give the topology ranks_per_node=",
        ]
        for text, rule in zip(found, rules, strict=True):
            assert rule in text


def test_copies_that_lie_unevenly_on_the_nodes_are_refused():
    """Three of four data ranks are on the first node."""

    def fn(rank, world_size):
        topology = lab.Topology([("dp", 3), ("tp", 2)], ranks_per_node=2 * 2 - 1)
        return refused(lambda: Zero1(nn.Linear(2, 2), lab.Mesh(topology), hybrid=True))

    for text in launch(fn, 6):
        assert "dp group [0, 2, 4] lies unevenly on nodes of 3 ranks: [(0, 2), (4,)]; shard over all copies" in text


def test_an_edp_that_leaves_out_ranks_with_other_data_is_refused_without_a_rank():
    with pytest.raises(ValueError, match=r"got dp 2 x cp 2 = 4 ranks with experts_over=\('dp',\); use experts_over="):
        copy_axes(lab.Topology([("dp", 2), ("cp", 2)], edp=2))


@pytest.mark.parametrize("sizes", [[("dp", 2)], [("tp", 2), ("dp", 2)]], ids=str)
def test_a_group_is_a_mesh_with_one_axis_to_the_bit(sizes):
    """Norms and weights after clipped steps; the group is the world, or one of two."""

    def fn(rank, world_size):
        mesh, found = lab.Mesh(lab.Topology(sizes)), {}
        for name, stage in STAGES.items():
            for over in (mesh, mesh.group("dp")):
                torch.manual_seed(mesh.rank("dp"))
                model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
                units = {"units": [model[0], model[2]]} if stage is Zero3 else {}
                optimizer, norms = stage(model, over, **units, **HYPER, bucket_bytes=200), []
                for number in range(STEPS):
                    optimizer.zero_grad()
                    x = torch.full((2, 5), 1.0 + number + mesh.rank("dp"), dtype=torch.float64)
                    model(x).square().sum().backward()
                    norms.append(optimizer.step(max_norm=MAX_NORM).norm)
                found.setdefault(name, []).append((norms, full_weights(optimizer)))
        return found

    for found in launch(fn, lab.Topology(sizes).world_size):
        for (norms, weights), (other_norms, other_weights) in found.values():
            assert norms == other_norms
            assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


def test_over_a_group_a_weight_that_other_stages_hold_too_is_refused():
    def fn(rank, world_size):
        module = nn.Sequential(nn.Linear(2, 2))
        module.stages, module.tied = {0: module[0]}, {0: "weight", 1: "weight"}
        return refused(lambda: DDP(module))

    for text in launch(fn, 2):
        assert (
            "stages [0, 1] hold one weight, and stages [0] are here; give the optimizer the Mesh and the program"
            in text
        )
