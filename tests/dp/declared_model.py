"""A model that declares its parts: layers of experts and of tp, in stages whose names are those of the full model."""

import zlib

import torch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.ep.deepseek_moe import DeepSeekMoE, DeepSeekRouter
from dualpipe_lab.ep.moe import ExpertParallel
from dualpipe_lab.pp.schedules import build as build_program
from dualpipe_lab.tp.gqa import GroupedQueryAttention, kv_replicas
from dualpipe_lab.tp.linear import ColumnParallelLinear
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import TensorParallel, shards_of
from dualpipe_lab.tp.swiglu import SwiGLU

HIDDEN, FFN, EXPERTS, NUM_LAYERS = 3, 5, 4, 2  # 5 rows on 2 ranks of tp: 3 and 2
HEADS, KV_HEADS, HEAD_SIZE = 2, 1, 2  # on 2 ranks of tp both hold the KV head
HYPER = {"lr": 0.01, "weight_decay": 0.1}


def mesh_of(axes):
    return lab.Mesh(lab.Topology(axes))


class Layer(nn.Module):
    def __init__(self, tp, ep):
        super().__init__()
        self.norm = RMSNorm(HIDDEN, tp=tp, dtype=torch.float64)
        replicas = kv_replicas(KV_HEADS, tp)
        self.attention = GroupedQueryAttention(
            HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, tp=tp, replicas=replicas, dtype=torch.float64
        )
        self.head = ColumnParallelLinear(HIDDEN, 2 * FFN, bias=True, tp=tp, dtype=torch.float64)
        router = DeepSeekRouter(HIDDEN, EXPERTS, 2, dtype=torch.float64)
        shared = SwiGLU(HIDDEN, FFN, tp=tp, dtype=torch.float64)
        self.moe = DeepSeekMoE(router, HIDDEN, FFN, ep=ep, shared=shared, dtype=torch.float64)


class ModelStage(nn.Module):
    """Some layers under their numbers in the full model; without `named`, a stage that does not say where names start.

    Args:
        layers: numbers of the layers.
        tp, ep: the ranks of their parts.
        named: whether names count from here.
    """

    def __init__(self, layers, tp, ep, named=True):
        super().__init__()
        self.layers = nn.ModuleDict({str(number if named else at): Layer(tp, ep) for at, number in enumerate(layers)})
        if named:
            self.names_start_here = True


class RankModel(nn.Module):
    """This rank's stages; under DualPipe's placement a rank holds those of both directions."""

    def __init__(self, mesh, mirrored=False):
        super().__init__()
        self.mesh = mesh
        groups = [self.mesh.group(axis) for axis in ("tp", "ep", "dp")]
        tp, ep = TensorParallel(groups[0]), ExpertParallel(groups[1], groups[2])
        pp, rank = self.mesh.size("pp"), self.mesh.rank("pp")
        numbers = [rank, pp - 1 - rank] if mirrored else [rank]
        per, self.program = NUM_LAYERS // pp, build_program("dualpipe" if mirrored else "1f1b", pp, 2 * pp)
        self.parts = nn.ModuleDict(
            {str(stage): ModelStage(range(stage * per, (stage + 1) * per), tp, ep) for stage in sorted(set(numbers))}
        )
        self.parameter_shards = shards_of(self)

    @property
    def stages(self):
        return {int(number): stage for number, stage in self.parts.items()}

    def full_name(self, name):
        return name.split(".", 2)[2]

    def biases(self):
        return {self.full_name(name): buffer for name, buffer in self.named_buffers() if name.endswith("router.bias")}


def numbers(name, kind, shape):
    """Numbers of the full tensor, drawn by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind}/{name}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def local(model, name, tensor, kind):
    """This rank's shard of the numbers of a tensor."""
    shard = model.parameter_shards.get(name)
    full = numbers(model.full_name(name), kind, tensor.shape if shard is None else shard.full_shape(tensor))
    return full if shard is None else shard.of(full)


def build(kind, mesh, mirrored=False, seed=None):
    """A model with an optimizer of `KINDS`; with `seed`, weights and biases that no other seed has."""
    model = RankModel(mesh, mirrored)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(local(model, name, tensor, f"weight {seed}"))
    options = {**HYPER, "bucket_bytes": 600}
    if kind == "Zero1 over dp":
        return model, Zero1(model, model.mesh.group("dp"), **options)
    if kind == "Zero3":
        units = [unit for unit in model.modules() if unit._parameters]
        return model, Zero3(model, model.mesh, units=units, **options, program=model.program)
    return model, KINDS[kind](model, model.mesh, **options, program=model.program)


KINDS = {"Zero1 over dp": Zero1, "DDP": DDP, "Zero1": Zero1, "Zero2": Zero2, "Zero3": Zero3}


def step(model, optimizer, number):
    """One step with gradients that are drawn by name; of those that are summed, each rank has an equal share."""
    optimizer.zero_grad()
    gradients = {
        parameter: local(model, name, parameter, f"gradient {number}") for name, parameter in model.named_parameters()
    }
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
