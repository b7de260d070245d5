"""A V3-style model of experts, tp layers and stages under every optimizer, with gradients that are drawn by name."""

import zlib

import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.models import V3MoEConfig, build_stages
from dualpipe_lab.pp.schedules import build as build_program

SIZES = {"vocabulary_size": 7, "hidden_size": 4, "num_heads": 2, "num_kv_heads": 1}  # uneven, and replicas, on tp 2
CONFIG = V3MoEConfig(**SIZES, num_layers=2, ffn_size=5, expert_ffn_size=3, num_experts=4, num_groups=2)
HYPER = {"lr": 0.01, "weight_decay": 0.1}
KINDS = {"Zero1 over dp": Zero1, "DDP": DDP, "Zero1": Zero1, "Zero2": Zero2, "Zero3": Zero3}


def mesh_of(axes):
    return lab.Mesh(lab.Topology(axes))


def local(said, kind):
    """This rank's shard of the numbers of a parameter, which are drawn by its name in the full model."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind}/{said.name}".encode()))
    full = torch.randn(said.shape, generator=generator, dtype=torch.float64)
    return full if said.shard is None else said.shard.of(full)


def build(kind, mesh, mirrored=False, seed=0):
    """A model with an optimizer of `KINDS`; weights and selection biases are those of the seed."""
    size = mesh.size("pp")
    program = build_program("dualpipe" if mirrored else "1f1b", size, 2 * size)
    model = build_stages(CONFIG, mesh, program, seed=seed, dtype=torch.float64)
    for bias in biases(model).values():
        bias.copy_(torch.arange(CONFIG.num_experts) + seed)
    options = {**HYPER, "bucket_bytes": 600, "reduce": "sum"}
    if kind == "Zero1 over dp":
        return model, Zero1(model, mesh.group("dp"), **options)
    if kind == "Zero3":
        options["units"] = [unit for unit in model.modules() if unit._parameters]
    return model, KINDS[kind](model, mesh, **options, program=program)


def biases(model):
    """The selection biases by their names in the full model, which follow those of their stage."""
    return {name.split(".", 2)[2]: buffer for name, buffer in model.named_buffers() if name.endswith("router.bias")}


def step(optimizer, number):
    """One step with gradients that are drawn by name; of those that are summed, each rank has an equal share."""
    optimizer.zero_grad()
    gradients = {parameter: local(said, f"gradient {number}") for parameter, said in optimizer.spec.parameters.items()}
    if isinstance(optimizer, Zero3):
        for flat in optimizer.flats:
            layout, rank = flat.bucket.layout, comm.get_rank(flat.bucket.group)
            for part in layout.tensors_in(rank):
                begin = layout.offsets[part.tensor] + part.start - layout.span(rank)[0]
                values = gradients[flat.bucket.parameters[part.tensor]].reshape(-1)[part.start : part.stop]
                flat.grad[begin : begin + len(values)] = values
    else:
        for parameter, grad in gradients.items():
            share = grad / comm.get_world_size(optimizer.spec.group_of(parameter))
            if parameter.grad is None:
                parameter.grad = share.clone()
            else:
                parameter.grad.copy_(share)
    assert optimizer.step().stepped
