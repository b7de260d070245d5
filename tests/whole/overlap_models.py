"""In a rank: a step of a V3 model on a pipeline with overlappable stages, and its distance from one process."""

import torch
from stage_runs import bias_of

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.ep.moe import expert_parameters
from dualpipe_lab.ep.overlap import overlappable_stage, overlapped_forward_backward
from dualpipe_lab.models.mtp import next_tokens
from dualpipe_lab.models.plain_v3_moe import PlainMTP, PlainV3MoE
from dualpipe_lab.models.rank_model import build_stages
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime.stage import run_pair_serially
from dualpipe_lab.tp.shard import initialize_parameters, shards_of

CONFIG = V3MoEConfig(
    vocabulary_size=29, hidden_size=12, num_layers=5, num_dense_layers=1, num_heads=2, num_kv_heads=1, ffn_size=20,
    expert_ffn_size=6, balance=0.3,
)  # fmt: skip
ROWS, LENGTH = 2, 8
OPTIMIZERS = {"DDP": DDP, "Zero1": Zero1, "Zero2": Zero2, "Zero3": Zero3}
HOOKS = {"overlapped": overlapped_forward_backward, "serial": run_pair_serially}


def batch(config, number, num_data):
    """`ids` and `targets` of all data ranks, [rank, microbatch, row, token]."""
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(config.vocabulary_size, (2, num_data, number, ROWS, LENGTH), generator=generator)
    targets[0, 0, 0, :3] = -100  # microbatches have unequal numbers of targets, and one has none
    targets[0, 1] = -100
    return ids, targets


def one_process(config, number, num_data, second=None):
    """Loss, gradients, and the load of each router; `second`: the weight of a second token's loss."""
    model = PlainV3MoE(config, torch.float64) if second is None else PlainMTP(config, second, torch.float64)
    initialize_parameters(model)
    loads = {}
    for place, layer in numbered(model):
        layer.mlp.router.selection_bias = bias_of(place, config.num_experts)
        layer.mlp.router.register_forward_hook(
            lambda _, x, out, place=place: loads.update({place: out[1].flatten().bincount(minlength=8)})
        )
    ids, targets = batch(config, number, num_data)
    loss = model.loss(ids.flatten(0, 2), targets.flatten(0, 2))
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return loss.detach(), grads, loads


def numbered(model):
    """The layers with experts and their numbers; that of a second token comes behind all others."""
    found = [(int(number), layer) for number, layer in model.layers.named_children() if hasattr(layer.mlp, "router")]
    extra = [] if not hasattr(model, "mtp") else [(CONFIG.num_layers, model.mtp.get_submodule("layer"))]
    return found + extra


def build(
    config, mesh, program, layers=None, again=False, sequence_parallel=False, layout="zigzag", second=None, chunk=None
):
    """This rank's model; `layers`: the number of layers of each stage."""
    shares = make_layout(layout, LENGTH, mesh.size("cp")) if mesh.size("cp") > 1 else None
    model = build_stages(
        config, mesh, program, layers=layers, dtype=torch.float64, recompute=again, layout=shares,
        sequence_parallel=sequence_parallel, mtp=second, loss_chunk=chunk,
    )  # fmt: skip
    for stage in model.stages.values():
        for number, layer in numbered(stage):
            layer.mlp.router.bias.copy_(bias_of(number, config.num_experts))
    return model


def attach(optimizer, model):
    """An optimizer over all axes, or over dp alone; None leaves every sum to the test."""
    if optimizer is None:
        return None
    units = {"units": list(model.stages.values())} if optimizer == "Zero3" else {}
    return OPTIMIZERS[optimizer](model, model.mesh, **units, program=model.program)


def run(reference, config, axes, name, number, layers, hook="overlapped", plain=(), zero=None, **options):
    """Errors of loss, evaluation and gradients against `one_process`; the loads of this rank's routers, once per tp."""
    mesh = lab.Mesh(lab.Topology(axes))
    program = schedules.build(name, mesh.size("pp"), number)
    model = build(config, mesh, program, layers, **options)
    modules = model.stages
    num_data = mesh.size("dp") * mesh.size("ep")
    ids, targets = batch(config, number, num_data)
    num_tokens, mine = int((targets >= 0).sum()), mesh.rank("dp") * mesh.size("ep") + mesh.rank("ep")
    ids, targets = ids[mine], targets[mine]
    shifted = next_tokens(ids, targets)  # in full
    if mesh.size("cp") > 1:
        layout = make_layout(options.get("layout", "zigzag"), LENGTH, mesh.size("cp"))
        ids, targets, *shifted = (
            shard_sequence(each, layout, mesh.rank("cp"), dim=-1) for each in (ids, targets, *shifted)
        )
    model.begin_step(num_tokens, num_data * number * ROWS)
    stages = {s: m if s in plain else overlappable_stage(m, s) for s, m in modules.items()}

    optimizer = attach(zero, model)
    runtime = lab.PipelineRuntime(
        program, stages, model.loss_fn(), group=mesh.group("pp"), overlapped=HOOKS[hook],
    )  # fmt: skip
    ones, calls = [1.0] * number, count_calls(modules)
    extra = model.extra_inputs(*shifted) if model.mtp else None
    result = runtime.step(list(ids), list(targets), ones, extra)
    if model.tied:
        runtime.sum_tied(model.tied)
    loads = loads_of(modules) if mesh.rank("tp") == 0 else {}
    model.eval()
    evaluation = runtime.evaluate(list(ids), list(targets), ones)
    assert not any(stage.num_live for stage in runtime._stages.values())
    if optimizer:
        keep_sums(optimizer)
    expected, grads, _ = reference
    data = mesh.group(*(axis for axis in ("dp", "ep", "cp") if axis in mesh.topology.names), "pp")
    found = sum_of([*result.losses.values(), *result.stage_losses.values()], data)
    heads = sum_of(evaluation.losses.values(), data), sum_of(result.losses.values(), data)
    errors = {"loss": float(abs(found - expected))}
    backwards = {s: sum(a.kind in "BW" and a.stage == s for a in program.actions(mesh.rank("pp"))) for s in modules}
    assert all(len(each) == 1 and each.pop() == backwards[s] for s, each in calls().items())
    if config.balance == 0:  # the last stage's balance loss counts with its head's
        only = one_process(config, number, num_data)[0] if model.mtp else heads[1]  # of the next token alone
        errors["evaluation"] = float(abs(heads[0] - only))
    for module in modules.values():
        errors |= gradient_errors(module, mesh, grads, () if optimizer else ("dp", "ep", "cp"))
    return errors, loads


def sum_of(losses, group):
    total = torch.stack([torch.zeros((), dtype=torch.float64), *losses]).sum()
    comm.all_reduce(total, group=group)
    return total


def loads_of(modules):
    return {number: layer.mlp.router.load.clone() for module in modules.values() for number, layer in numbered(module)}


def count_calls(modules):
    """Return a function that returns, by stage, how often the hooks of its parameters have been called."""
    counts = {s: dict.fromkeys(module.parameters(), 0) for s, module in modules.items()}

    def count(s):
        return lambda parameter: counts[s].update({parameter: counts[s][parameter] + 1})

    for s, module in modules.items():
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(count(s))
    return lambda: {s: set(each.values()) for s, each in counts.items()}


def keep_sums(optimizer):
    """Put the sums into `.grad`, in full."""
    found = full_gradients(optimizer)
    for parameter, name in optimizer.names.items():
        parameter.grad = found[name]


def gradient_errors(module, mesh, grads, summed):
    """Sum this stage's gradients over the ranks with other data, and compare them with their shards."""
    shards, experts = shards_of(module), {id(p) for p in expert_parameters(module)}
    errors = {}
    for name, parameter in module.named_parameters():
        axes = [axis for axis in summed if axis != "ep" or id(parameter) not in experts]
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        comm.all_reduce(grad, group=mesh.group(*(axis for axis in axes if axis in mesh.topology.names)))
        full = grads[getattr(module, "tied_names", {}).get(name, name)]
        expected = full if name not in shards else shards[name].of(full)
        errors[name] = float((grad - expected).abs().max() / max(1e-30, float(expected.abs().max())))
    return errors


def worst(results):
    """The largest error of all ranks, and its name."""
    return max((error, name) for errors, _ in results for name, error in errors.items())


def added(results):
    """The load of each layer, over all ranks."""
    total = {}
    for _, loads in results:
        for place, load in loads.items():
            total[place] = total.get(place, 0) + load
    return total
