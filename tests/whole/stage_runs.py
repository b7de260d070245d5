"""What the tests of whole models share: a batch for all data ranks, one step on any cut, and plain torch's.

Stages run as they are, or in pieces (`hook`), whose experts' all-to-alls overlap.  Gradients are summed by the test, or
by an optimizer (`zero`).
"""

from functools import cache, partial
from math import prod

import torch
from runs import assert_a1, distances

import dualpipe_lab as lab
from dualpipe_lab import comm, dp
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.dp.data_parallel import num_valid_tokens
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.ep.moe import expert_parameters
from dualpipe_lab.ep.overlap import overlappable_stage, overlapped_forward_backward
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.mtp import next_tokens
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.plain_v3_moe import PlainMTP, PlainV3MoE
from dualpipe_lab.models.rank_model import build_stages
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.pp.runtime.stage import run_pair_serially
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.shard import initialize_parameters

ROWS, LENGTH, SEED = 3, 12, 5  # no powers of two: 1 / 12 has no exact form in any type
SIZES = {"vocabulary_size": 19, "hidden_size": 8, "ffn_size": 10, "num_heads": 2, "num_kv_heads": 1, "num_layers": 5}
LLAMA = LlamaConfig(**SIZES)
TIED = LlamaConfig(**SIZES, tied=True, qk_norm=True)
V3 = V3MoEConfig(**SIZES, expert_ffn_size=6, balance=0.3)
LATENT = V3MoEConfig(**SIZES, expert_ffn_size=6, balance=0.3, latent=LatentSizes(6, 5, content=4, position=2, value=3))
HOOKS = {"overlapped": overlapped_forward_backward, "serial": run_pair_serially}


def batch(vocabulary, num_microbatches, num_data=1):
    """Ids and targets, `_NMBS`: every microbatch has another number of valid targets, and one has none."""
    generator = torch.Generator().manual_seed(num_microbatches)
    ids, targets = torch.randint(vocabulary, (2, num_data, num_microbatches, ROWS, LENGTH), generator=generator)
    for number, part in enumerate(targets.flatten(0, 1)):
        part.view(-1)[: 3 * number % (2 * LENGTH)] = -100
    targets[0, 1 % num_microbatches] = -100
    return ids, targets


def bias_of(number, num_experts):
    """The selection bias of a layer's router."""
    generator = torch.Generator().manual_seed(number)
    return 0.5 * torch.randn(num_experts, generator=generator, dtype=torch.float64)


def plain_model(config, dtype=torch.float64, mtp=None):
    """The full model in plain torch, drawn by name, with biases; `mtp`: the weight of a second token's loss."""
    make = (
        PlainLlama if isinstance(config, LlamaConfig) else PlainV3MoE if mtp is None else partial(PlainMTP, weight=mtp)
    )
    model = make(config, dtype=dtype)
    initialize_parameters(model, SEED)
    for number, router in routers(model):
        if router.selection_bias is not None:
            router.selection_bias = bias_of(number, config.num_experts).to(dtype)
    return model


def routers(model):
    """The numbers of layers with experts, and their routers; the layer of a second token comes behind all others."""
    layers = [(int(number), layer) for number, layer in model.layers.named_children()]
    if hasattr(model, "mtp"):
        layers.append((model.config.num_layers, model.mtp.get_submodule("layer")))
    return [(number, layer.mlp.router) for number, layer in layers if hasattr(layer.mlp, "router")]


@cache
def plain(config, num_microbatches, num_data=1, mtp=None):
    """Loss, gradients and loads of one process on the whole batch."""
    model, loads = plain_model(config, mtp=mtp), {}
    for number, router in routers(model):
        router.register_forward_hook(
            lambda _, x, out, number=number: loads.update(
                {f"load {number}": out[1].flatten().bincount(minlength=config.num_experts)}
            )
        )
    loss = model.loss(*(x.flatten(0, 2) for x in batch(config.vocabulary_size, num_microbatches, num_data)))
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {"loss": loss.detach()} | grads | loads


def data_axes(mesh, axes=("dp", "ep", "cp")):
    return tuple(axis for axis in mesh.topology.names if axis in axes)


def build(config, mesh, program, layout=None, dtype=torch.float64, **options):
    layout = layout and make_layout(layout, LENGTH, mesh.size("cp"))
    model = build_stages(config, mesh, program, seed=SEED, dtype=dtype, layout=layout, **options)
    for stage in model.stages.values():
        for number, router in routers(stage):
            if router.bias is not None:
                router.bias.copy_(bias_of(number, config.num_experts))
    return model


def runs(config, axes, names, num_microbatches=4, edp=None, over=("dp",), zero=None, hook=None, plainly=(), **options):
    """In a rank: the distances of each schedule.  `plainly`: the stages that do not run in pieces."""
    torch.manual_seed(lab.comm.get_rank())  # weights or shards that are not drawn by name would differ
    mesh = lab.Mesh(lab.Topology(axes, edp=edp, experts_over=over))
    num_data = prod(size for axis, size in axes if axis in ("dp", "ep"))
    expected, found = plain(config, num_microbatches, num_data, options.get("mtp")), {}
    for name in names:
        model = build(config, mesh, schedules.build(name, mesh.size("pp"), num_microbatches), **options)
        units = {"units": list(model.stages.values())} if zero is dp.Zero3 else {}
        optimizer = zero and zero(model, mesh, **units, program=model.program, reduce="sum")
        found[name] = distances(step(model, True, optimizer, hook, plainly) | loads_of(model), expected)
    return found


def step(model, explicit=True, optimizer=None, hook=None, plainly=()):
    """One step of a rank: loss and raw gradients of the full model."""
    total = backward(model, explicit, hook, plainly)
    if optimizer is None:
        sum_gradients(model)
    else:
        sums = full_gradients(optimizer)
        for parameter, name in optimizer.names.items():
            parameter.grad = sums.get(name)  # frozen ones have none
    return {"loss": total} | model.full_state_dict("grad")


def loads_of(model):
    """By layer, how often all ranks have chosen each expert; every rank of tp has chosen the same."""
    mine = [(n, router.load) for stage in model.stages.values() for n, router in routers(stage)]
    total = {}
    for found in comm.all_gather_object(mine if model.mesh.rank("tp") == 0 else []):
        for number, load in found:
            total[f"load {number}"] = total.get(f"load {number}", 0) + load
    return total


def backward(model, explicit=True, hook=None, plainly=()):
    """Forward and backward of a rank's microbatches; returns the loss of the step, over all ranks."""
    mesh, program = model.mesh, model.program
    number, axes = program.num_microbatches, data_axes(mesh, ("dp", "ep"))
    data = mesh.group(*data_axes(mesh))
    ids, targets = batch(model.config.vocabulary_size, number, _size(mesh, axes))
    ids, targets = (tensor[_number(mesh, axes)] for tensor in (ids, targets))
    shifted = next_tokens(ids, targets)  # in full: the token after a shard's last one is on another rank
    if mesh.size("cp") > 1:
        layout = next(iter(model.stages.values())).layout
        ids, targets, *shifted = (shard_sequence(x, layout, mesh.rank("cp"), dim=-1) for x in (ids, targets, *shifted))
    model.begin_step(num_valid_tokens(targets, data), number * ROWS * _size(mesh, axes))
    boundary = model.boundary(ROWS, ids.shape[-1]) if explicit else None
    stages, options = model.stages, {}
    if hook:
        stages = {s: module if s in plainly else overlappable_stage(module, s) for s, module in stages.items()}
        boundary, options = None, {"overlapped": HOOKS[hook]}
    runtime = PipelineRuntime(program, stages, model.loss_fn(), boundary, group=mesh.group("pp"), **options)
    calls, extra = count_calls(model.stages), model.extra_inputs(*shifted) if model.mtp else None
    result = runtime.step(list(ids), list(targets), weights=[1.0] * number, extra=extra)
    for (
        s,
        counts,
    ) in calls.items():  # a gradient is whole when its hooks are called: once for each backward of its stage
        assert set(counts.values()) == {sum(a.kind in "BW" and a.stage == s for a in program.actions(mesh.rank("pp")))}
    if model.tied:
        runtime.sum_tied(model.tied)
    losses = [*result.losses.values(), *result.stage_losses.values()]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *losses]).sum()
    comm.all_reduce(total, group=mesh.group(*data_axes(mesh, ("dp", "ep", "cp", "pp"))))
    return total


def count_calls(modules):
    """By stage and parameter, how often the hooks of the parameter will have been called."""
    counts = {s: {p: 0 for p in module.parameters() if p.requires_grad} for s, module in modules.items()}
    for found in counts.values():
        for parameter in found:
            parameter.register_post_accumulate_grad_hook(lambda p, found=found: found.update({p: found[p] + 1}))
    return counts


def sum_gradients(model):
    """Sum over the ranks with other data: experts over their copies, everything else over all of them."""
    mesh, experts = model.mesh, {id(parameter) for parameter in expert_parameters(model)}
    edp = mesh.group("edp") if mesh.topology.edp else mesh.group(*data_axes(mesh, ("dp", "cp")))
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        comm.all_reduce(parameter.grad, group=edp if id(parameter) in experts else mesh.group(*data_axes(mesh)))


def _size(mesh, axes):
    size = 1
    for axis in axes:
        size *= mesh.size(axis)
    return size


def _number(mesh, axes):
    number = 0
    for axis in axes:
        number = number * mesh.size(axis) + mesh.rank(axis)
    return number


def check_cuts(cuts):
    """Run every cut, all of one number of ranks: (config, axes, schedules, options) by name; one launch for all."""

    def fn(rank, world_size):
        return {
            (cut, name): error
            for cut, (config, axes, names, options) in cuts.items()
            for name, error in runs(config, axes, names, **options).items()
        }

    launched = launch(fn, prod(size for _, size in next(iter(cuts.values()))[1]))
    assert len(launched[0]) == sum(len(names) for _, _, names, _ in cuts.values())
    assert_a1(launched)


def launch(fn, world_size, *args):
    return lab.launch(fn, world_size, *args, output="collect", timeout=400)
