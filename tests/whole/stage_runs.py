"""What the tests of whole models share: a batch for all data ranks, one step on any cut, and plain torch's."""

from functools import cache

import torch
from runs import A1

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.dp.data_parallel import num_valid_tokens
from dualpipe_lab.ep.moe import expert_parameters
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.mtp import next_tokens
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.plain_v3_moe import PlainV3MoE
from dualpipe_lab.models.rank_model import build_stages
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.tp.shard import initialize_parameters

ROWS, LENGTH, SEED = 3, 12, 5  # no powers of two: 1 / 12 has no exact form in any type


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


def plain_model(config, dtype=torch.float64):
    """The full model in plain torch, drawn by name, with biases."""
    model = (PlainLlama if isinstance(config, LlamaConfig) else PlainV3MoE)(config, dtype)
    initialize_parameters(model, SEED)
    for number, router in routers(model):
        if router.selection_bias is not None:
            router.selection_bias = bias_of(number, config.num_experts).to(dtype)
    return model


def routers(model):
    """The numbers of layers with experts, and their routers."""
    named = model.layers.named_children()
    return [(int(number), layer.mlp.router) for number, layer in named if hasattr(layer.mlp, "router")]


@cache
def plain(config, num_microbatches, num_data=1, dtype=torch.float64):
    """Loss and gradients of one process on the whole batch."""
    model = plain_model(config, dtype)
    ids, targets = batch(config.vocabulary_size, num_microbatches, num_data)
    loss = model.loss(ids.flatten(0, 2), targets.flatten(0, 2))
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {"loss": loss.detach()} | grads


def plain_loads(config, num_microbatches, num_data=1):
    """By layer, how often one process chooses each expert."""
    model, loads = plain_model(config), {}
    for number, router in routers(model):
        router.register_forward_hook(
            lambda _, x, out, number=number: loads.update(
                {number: out[1].flatten().bincount(minlength=config.num_experts)}
            )
        )
    model.loss(*(tensor.flatten(0, 2) for tensor in batch(config.vocabulary_size, num_microbatches, num_data)))
    return loads


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


def step(model, explicit=True):
    """One step of a rank: loss and raw gradients of the full model."""
    total = backward(model, explicit)
    sum_gradients(model)
    return {"loss": total} | model.full_state_dict("grad")


def backward(model, explicit=True):
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
    extra = model.extra_inputs(*shifted) if model.mtp else None
    total = _run(model, program, ids, targets, explicit, extra)
    comm.all_reduce(total, group=data)
    return total


def _run(model, program, ids, targets, explicit, extra=None):
    boundary = model.boundary(ROWS, ids.shape[-1]) if explicit else None
    runtime = PipelineRuntime(program, model.stages, model.loss_fn(), boundary, group=model.mesh.group("pp"))
    result = runtime.step(list(ids), list(targets), weights=[1.0] * program.num_microbatches, extra=extra)
    if model.tied:
        runtime.sum_tied(model.tied)
    losses = [*result.losses.values(), *result.stage_losses.values()]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *losses]).sum()
    comm.all_reduce(total, group=model.mesh.group("pp"))
    return total


def sum_gradients(model):
    """Sum over the ranks with other data: experts over their copies, everything else over all of them."""
    mesh, experts = model.mesh, {id(parameter) for parameter in expert_parameters(model)}
    edp = mesh.group("edp") if mesh.topology.edp else mesh.group(*data_axes(mesh, ("dp", "cp")))
    for parameter in model.parameters():
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


def worst(found, expected):
    """The largest distance relative to a tensor's largest number, and its name; infinite for other names."""
    if found.keys() != expected.keys():
        return float("inf"), str(sorted(found.keys() ^ expected.keys()))
    far = {
        name: float((found[name] - value).abs().max() / max(float(value.abs().max()), 1e-30))
        for name, value in expected.items()
    }
    name = max(far, key=far.get)
    return far[name], name


def assert_exact(launched):
    """Every rank's every case is within the limit."""
    assert launched
    for rank, found in enumerate(launched):
        assert found
        for case, (error, name) in found.items():
            assert error <= A1, f"rank {rank}, {case}: {name} is off by {error:.1e}"


def launch(fn, world_size, *args):
    return lab.launch(fn, world_size, *args, output="collect", timeout=400)
