"""One optimizer for this rank's stages and experts, on a mesh: gradients, norm, clip and weights of one process."""

from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import pytest
import torch
from runs import A1, launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.adam import AdamW
from dualpipe_lab.dp.data_parallel import num_valid_tokens
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.sharded import full_gradients, full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.mtp import next_tokens
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.plain_v3_moe import PlainMTP, PlainV3MoE
from dualpipe_lab.models.rank_model import build_stages
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.tp.shard import initialize_parameters

SIZES = {"vocabulary_size": 19, "hidden_size": 8, "ffn_size": 10, "num_heads": 2, "num_kv_heads": 1}
LLAMA = LlamaConfig(**SIZES, num_layers=4)
TIED = LlamaConfig(**SIZES, num_layers=4, tied=True)
V3 = V3MoEConfig(**SIZES, num_layers=4, expert_ffn_size=6, num_experts=4, num_groups=2, balance=0.3)
SECOND = replace(V3, balance=0.2)  # with a second token
SMALL = replace(V3, num_layers=2)
WEIGHT = 0.3
# eps is large: else Adam would hide a gradient that is clipped too much
HYPER, MAX_NORM, STEPS, M, ROWS, LENGTH = {"lr": 0.01, "eps": 0.1, "weight_decay": 0.1}, 0.5, 2, 4, 2, 6
STAGES = {"DDP": DDP, "Zero1": Zero1, "Zero2": Zero2, "Zero3": Zero3}
CASES = {  # every optimizer under every schedule of a case
    "pp 2 x dp 2": (LLAMA, lab.Topology([("pp", 2), ("dp", 2)]), ("1f1b", "dualpipe", "zero_bubble_h1")),
    "tied, pp 2 x dp 2": (TIED, lab.Topology([("pp", 2), ("dp", 2)]), ("1f1b", "dualpipe", "dualpipev")),
    "tied, pp 2 x tp 2": (TIED, lab.Topology([("tp", 2), ("pp", 2)]), ("1f1b", "dualpipe", "zero_bubble_h1")),
    "pp 2 x tp 2": (LLAMA, lab.Topology([("pp", 2), ("tp", 2)]), ("dualpipe", "dualpipev", "zero_bubble_h1")),
    "pp 2 x ep 2": (V3, lab.Topology([("pp", 2), ("ep", 2)]), ("dualpipe", "1f1b", "zero_bubble_h1")),
    "a second token, dp 2": (SECOND, lab.Topology([("dp", 2)]), ("1f1b",)),
    "a second token, pp 2 x dp 2": (SECOND, lab.Topology([("pp", 2), ("dp", 2)]), ("1f1b", "dualpipe")),
    "a second token, ep 2 x pp 2": (SECOND, lab.Topology([("ep", 2), ("pp", 2)]), ("dualpipev", "zero_bubble_h1")),
    "ep 2 in dp 2 x pp 2": (V3, lab.Topology([("dp", 2), ("pp", 2)], edp=1), ("dualpipev", "dualpipe")),
}
EXPERTS = {  # no pipeline
    "ep 2": lab.Topology([("ep", 2)]),
    "dp 2 x ep 2": lab.Topology([("dp", 2), ("ep", 2)]),
    "dp 4, edp 2": lab.Topology([("dp", 4)], edp=2),
    "ep 2 x tp 2": lab.Topology([("ep", 2), ("tp", 2)]),
    "dp 2 x tp 2": lab.Topology([("dp", 2), ("tp", 2)]),
}
NODES = {  # shards within them, and replicas across them
    "dp 4 on 2 nodes, edp 2": lab.Topology([("dp", 4)], edp=2, ranks_per_node=2),
    "dp 2 x ep 2 on 2 nodes": lab.Topology([("dp", 2), ("ep", 2)], ranks_per_node=2),
    "ep 2 x dp 2 on 2 nodes": lab.Topology([("ep", 2), ("dp", 2)], ranks_per_node=2),
}
MOMENTUM = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}  # of some cases, in place of AdamW
SGD_CASES = ("tied, pp 2 x tp 2", "pp 2 x ep 2", "tied, pp 2 x dp 2")


def batch(config, step, num_data):
    """Ids and targets, `_NMBS`; some targets are ignored."""
    generator = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(config.vocabulary_size, (2, num_data, M, ROWS, LENGTH), generator=generator)
    targets[0, 1, 0, :3] = -100
    return ids, targets


def one_process(config, num_data, optimizer=AdamW, **hyper):
    """Gradients of the first step, norms and weights of all, by torch's clipping."""
    make = PlainLlama if isinstance(config, LlamaConfig) else PlainV3MoE
    model = (partial(PlainMTP, weight=WEIGHT) if config == SECOND else make)(config, dtype=torch.float64)
    initialize_parameters(model)
    optimizer, norms, grads = optimizer(model.parameters(), **hyper), [], None
    for step in range(STEPS):
        ids, targets = batch(config, step, num_data)
        optimizer.zero_grad()
        model.loss(ids.flatten(0, 2), targets.flatten(0, 2)).backward()
        grads = grads or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    assert min(norms) > 2 * MAX_NORM  # it does clip
    return grads, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def build(stage, model, mesh, program, **settings):
    options = {**(settings if "optimizer" in settings else HYPER | settings), "bucket_bytes": 2000, "reduce": "sum"}
    if stage is not Zero3:
        return stage(model, mesh, **options, program=program)
    children = [child for part in model.stages.values() for child in part.children()]
    units = [unit for child in children for unit in (child if isinstance(child, nn.ModuleList) else [child])]
    return Zero3(model, mesh, units=units, **options, program=program)


def data_axes(topology):
    return [axis for axis in ("dp", "ep") if axis in topology.names]


def num_data_of(topology):
    return prod(size for axis, size in zip(topology.names, topology.sizes, strict=True) if axis in data_axes(topology))


def train(optimizer, mesh, program):
    """The gradients of the first step, and all norms."""
    model, norms, grads = optimizer.module, [], None
    num_data, here = num_data_of(mesh.topology), 0
    for axis in data_axes(mesh.topology):
        here = here * mesh.size(axis) + mesh.rank(axis)
    runtime = PipelineRuntime(program, model.stages, model.loss_fn(), group=mesh.group("pp"))
    for step in range(STEPS):
        ids, targets = (tensor[here] for tensor in batch(model.config, step, num_data))
        model.begin_step(num_valid_tokens(targets, model.data), num_data * M * ROWS)
        optimizer.zero_grad()
        extra = model.extra_inputs(*next_tokens(ids, targets)) if model.mtp else None
        runtime.step(list(ids), list(targets), weights=[1.0] * M, extra=extra)
        if model.tied:
            runtime.sum_tied(model.tied)  # nothing is left to it: the optimizer adds them, and not twice
        grads = full_gradients(optimizer) if grads is None else grads
        asked = optimizer.grad_norm()
        norms.append(optimizer.step(max_norm=MAX_NORM).norm)
        assert asked == norms[-1]
    return grads, norms


def spoil_copies(model, mesh):
    """Draw anew what other ranks hold, too: the optimizer makes copies equal."""
    for name, parameter in model.named_parameters():
        copies = "edp" if ".experts." in name and mesh.topology.edp else "dp"
        if mesh.rank(copies):
            nn.init.normal_(parameter)


def worst(found, expected, optimizer):
    """The largest difference from this rank's parts of the full tensors, relative to the largest number of each."""
    off = 0.0
    for parameter, said in optimizer.spec.parameters.items():
        want = expected[said.name] if said.shard is None else said.shard.of(expected[said.name])
        assert said.shape == expected[said.name].shape
        if want.numel():
            mine = found[optimizer.names[parameter]]
            off = max(off, float((mine - want).abs().max() / expected[said.name].abs().max()))
    return off


def compare(config, topology, kinds, hyper=HYPER):
    expected_grads, expected_norms, expected = one_process(config, num_data_of(topology), **hyper)

    def fn(rank, world_size):
        mesh, found = lab.Mesh(topology), {}
        for name, kind in product(STAGES, kinds):
            program = schedules.build(kind, mesh.size("pp"), M)
            weight = WEIGHT if config == SECOND else None
            model = build_stages(config, mesh, program, dtype=torch.float64, mtp=weight)
            spoil_copies(model, mesh)
            optimizer = build(STAGES[name], model, mesh, program, **hyper, hybrid=topology.ranks_per_node is not None)
            grads, norms = train(optimizer, mesh, program)
            off = max(abs(norm / other - 1) for norm, other in zip(norms, expected_norms, strict=True))
            weights = worst(full_weights(optimizer), expected, optimizer)
            found[name, kind] = worst(grads, expected_grads, optimizer), off, weights
        return found

    for found in launch(fn, topology.world_size, timeout=400):
        assert len(found) == len(STAGES) * len(kinds)
        assert max(max(off) for off in found.values()) < A1, found


@pytest.mark.parametrize("name", CASES)
def test_gradients_norms_and_clipped_steps_are_those_of_one_process(name):
    """On whole, split, mirrored and folded pipelines."""
    compare(*CASES[name], MOMENTUM if name in SGD_CASES else HYPER)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_and_layers_on_a_mesh_without_a_pipeline_too(name):
    compare(SMALL, EXPERTS[name], ("1f1b",))


@pytest.mark.parametrize("name", NODES)
def test_shards_within_nodes_and_replicas_across_them_too(name):
    compare(SMALL, NODES[name], ("1f1b",))


@pytest.mark.parametrize(
    ("stage", "axis", "config"), [("Zero1", "tp", TIED), ("Zero3", "dp", TIED), ("Zero2", "ep", V3), ("DDP", "dp", V3)]
)
def test_copies_stay_equal_when_weights_are_rounded_at_random(stage, axis, config):
    """bf16 without masters: mirrors hold their stages in another order, and ranks of tp have shards of their own."""

    def fn(rank, world_size):
        mesh, program = lab.Mesh(lab.Topology([("pp", 2), (axis, 2)])), schedules.build("dualpipe", 2, M)
        model = build_stages(config, mesh, program, dtype=torch.bfloat16)
        optimizer = build(STAGES[stage], model, mesh, program, rounding_seed=3)
        before = full_weights(optimizer)
        train(optimizer, mesh, program)
        named = optimizer.spec.parameters.items()
        weights = full_weights(optimizer)
        moved = any(not torch.equal(weights[name], before[name]) for name in weights)
        return moved, {(said.name, said.shard): weights[optimizer.names[p]] for p, said in named}

    launched, copies = launch(fn, 4, timeout=400), {}
    for moved, weights in launched:
        assert moved
        for key, value in weights.items():
            copies.setdefault(key, []).append(value)
    assert min(map(len, copies.values())) >= 2  # mirrors at least
    for key, values in copies.items():
        assert all(torch.equal(value, values[0]) for value in values), key
