"""Stages of four kinds under every optimizer: one training step of a pipeline, and the same on one process."""

from math import hypot

import torch
from runs import Stages
from stage_zoo import Product
from torch import nn
from torch.distributed.fsdp import fully_shard

import dualpipe_lab as lab
from dualpipe_lab.dp.adam import AdamW
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.grad_norm import clip_factor, global_norm
from dualpipe_lab.dp.sharded import full_gradients, full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.ep.moe import ExpertParallel, Experts, MoE
from dualpipe_lab.ep.router import TopKRouter
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.tp.shard import load_full_state_dict, shards_of

WIDTH, ROWS, M, NUM_EXPERTS = 3, 2, 4, 4
PP, DP = 2, 2
MAX_NORM = 0.05  # below every norm here, so that each step is clipped
HYPER = {"lr": 1e-2, "eps": 1e-3}  # an eps that keeps the quotient of tiny gradients well conditioned
OPTIMIZERS = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
MIRRORED = ("easy_dualpipe", "dualpipe")


class WithExperts(nn.Module):
    """A linear layer, then experts beside a residual."""

    def __init__(self, ep=None):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        experts = Experts(WIDTH, WIDTH, NUM_EXPERTS, ep=ep)
        self.moe = MoE(TopKRouter(WIDTH, NUM_EXPERTS, 2), experts)

    def forward(self, x):
        x = torch.tanh(self.dense(x))
        return x + self.moe(x)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def make_stage(layers, ep=None):
    if layers == "experts":
        return WithExperts(ep).double()
    kinds = {
        "plain": lambda: [linear(), nn.Tanh()],
        "custom": lambda: [linear(), nn.Tanh(), Product(WIDTH)],
        "two": lambda: [linear(), nn.Tanh(), linear()],
    }
    return nn.Sequential(*kinds[layers]()).double()


def draw(layers, number):
    """The stages of one process, drawn from a seed."""
    torch.manual_seed(0)
    stages = [make_stage(layers) for _ in range(number)]
    for parameter in (p for stage in stages for p in stage.parameters()):
        nn.init.normal_(parameter, std=0.6)
    return stages


def batch(seed=1):
    """Inputs and targets: [data rank, microbatch, row, feature]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(DP, M, ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]


def one_process(rank, world_size, layers, number):
    """By stage and name: the weights, their gradients, the weights after one clipped step; and the norm."""
    stages, (xs, ys) = draw(layers, number), batch()
    model, before = nn.Sequential(*stages), by_stage(dict(enumerate(stages)), lambda p: p.detach().clone())
    for x, y in zip(xs.flatten(0, 1), ys.flatten(0, 1), strict=True):
        (nn.functional.mse_loss(model(x), y) / (DP * M)).backward()
    grads = by_stage(dict(enumerate(stages)), lambda p: p.grad.clone())
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
    assert norm > 2 * MAX_NORM
    AdamW(model.parameters(), **HYPER).step()
    return before, grads, by_stage(dict(enumerate(stages)), lambda p: p.detach().clone()), norm


def by_stage(stages, of):
    return {(index, name): of(p) for index, stage in stages.items() for name, p in stage.named_parameters()}


def copies(stage):
    """What every data rank has a copy of, as a module: all but experts."""
    return nn.ModuleList([stage.dense, stage.moe.router]) if isinstance(stage, WithExperts) else stage


def make_optimizer(kind, stages, mesh, program):
    """One optimizer for stages of a rank, with buckets across them; pp x dp, whose data ranks share the experts."""
    module, options = Stages(stages), {**HYPER, "bucket_bytes": 100, "program": program}
    if kind == "zero3":
        options["units"] = [layer for layer in module.modules() if layer._parameters]
    return OPTIMIZERS[kind](module, mesh, **options)


def shard_fully(stages, dp):
    """torch's `fully_shard` on every stage; experts stay outside of it."""
    for stage in stages.values():
        ignored = {p for layer in stage.modules() if isinstance(layer, Experts) for p in layer.parameters()}
        fully_shard(stage, mesh=dp, ignored_params=ignored)
        stage.set_gradient_divide_factor(1.0)  # sums, as everywhere in this library


def step_of_torch(stages, mesh):
    """A clipped step of torch's AdamW; the norm of the model, and the weights."""
    weights = [p for stage in stages.values() for p in stage.parameters()]
    groups = {axis: mesh.group(axis) for axis in ("pp", "dp")}
    norm = global_norm([(local(p.grad), set(groups)) for p in weights], groups)
    for p in weights:
        local(p.grad).mul_(clip_factor(norm, MAX_NORM))
    torch.optim.AdamW(weights, **HYPER, foreach=False).step()
    return norm, by_stage(stages, lambda p: full(p.detach()))


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def train(rank, world_size, kind, layers, programs, weights, joint):
    """One step of every program: which parts of parameters they are, gradients, norm and weights; or the refusal.

    `joint`: one optimizer holds all stages of a rank, else one each, which get the norm of all.
    """
    torch.manual_seed(1000 + rank)
    mesh = lab.Mesh(lab.Topology([("pp", PP), ("dp", DP)], edp=1))
    pp, dp = mesh.group("pp"), mesh.group("dp")
    is_torch_s = kind == "fsdp2"
    device_mesh = mesh.device_mesh() if is_torch_s else None
    xs, ys = (part[mesh.rank("dp")] for part in batch())
    results = []
    for program in programs.values():
        state, mine = weights[program.num_stages], {}
        for index in program.stages_of(mesh.rank("pp")):
            mine[index] = make_stage(layers, ExpertParallel(dp))
            load_full_state_dict(mine[index], {rest: value for (stage, rest), value in state.items() if stage == index})
        if not is_torch_s and mesh.rank("dp"):  # its optimizer has to make copies equal
            for parameter in (p for stage in mine.values() for p in copies(stage).parameters()):
                nn.init.normal_(parameter)
        try:
            if is_torch_s:
                shard_fully(mine, device_mesh["dp"])
            else:
                held = [mine] if joint else [{index: mine[index]} for index in mine]
                optimizers = [make_optimizer(kind, some, mesh, program) for some in held]
            runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, group=pp)
            runtime.step(list(xs), list(ys), [1 / (DP * M)] * M if is_torch_s else None)
            if is_torch_s:
                results.append((shards(mine), by_stage(mine, lambda p: full(p.grad)), *step_of_torch(mine, mesh)))
            else:
                numbers = {p: key for key, p in by_stage(mine, lambda p: p).items()}
                keys = [{name: numbers[p] for p, name in optimizer.names.items()} for optimizer in optimizers]
                grads = under(keys, map(full_gradients, optimizers))
                norm = None if joint else hypot(*(optimizer.grad_norm() for optimizer in optimizers))
                reports = [optimizer.step(max_norm=MAX_NORM, norm=norm) for optimizer in optimizers]
                assert all(report.stepped for report in reports)
                after = under(keys, map(full_weights, optimizers))
                results.append((shards(mine), grads, reports[0].norm if joint else norm, after))
        except ValueError as error:
            results.append(str(error))
    return results


def under(keys, tensors):
    """The tensors of all optimizers by stage and name."""
    pairs = zip(keys, tensors, strict=True)
    return {key[name]: tensor for key, found in pairs for name, tensor in found.items()}


def shards(stages):
    """Which part of a parameter a rank has, where it has a part."""
    return {(index, name): shard for index, stage in stages.items() for name, shard in shards_of(stage).items()}
