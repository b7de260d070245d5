"""A model that declares its parts: layers of experts and of tp, in stages whose names are those of the full model."""

import zlib

import torch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.adam import Hyperparameters
from dualpipe_lab.dp.sharded import ZeroOptions
from dualpipe_lab.ep.deepseek_moe import DeepSeekMoE, DeepSeekRouter
from dualpipe_lab.ep.moe import ExpertParallel
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.linear import ColumnParallelLinear
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import shards_of
from dualpipe_lab.tp.swiglu import SwiGLU

HIDDEN, FFN, EXPERTS, NUM_LAYERS = 3, 5, 4, 4  # 5 rows on 2 ranks of tp: 3 and 2
HYPER = Hyperparameters(lr=0.01, weight_decay=0.1)


class Layer(nn.Module):
    def __init__(self, tp, ep):
        super().__init__()
        self.norm = RMSNorm(HIDDEN, tp=tp, dtype=torch.float64)
        self.head = ColumnParallelLinear(HIDDEN, 2 * FFN, True, tp, dtype=torch.float64)
        router = DeepSeekRouter(HIDDEN, EXPERTS, 2, dtype=torch.float64)
        shared = SwiGLU(HIDDEN, FFN, tp, torch.float64)
        self.moe = DeepSeekMoE(router, HIDDEN, FFN, ep, shared, torch.float64)


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

    def __init__(self, axes, mirrored=False):
        super().__init__()
        self.mesh = lab.Mesh(lab.Topology(axes))
        groups = [self.mesh.group(axis) for axis in ("tp", "ep", "dp")]
        tp, ep = TensorParallel(groups[0]), ExpertParallel(groups[1], groups[2])
        pp, rank = self.mesh.size("pp"), self.mesh.rank("pp")
        numbers = [rank, pp - 1 - rank] if mirrored else [rank]
        per = NUM_LAYERS // pp
        self.stages = nn.ModuleDict(
            {str(stage): ModelStage(range(stage * per, (stage + 1) * per), tp, ep) for stage in sorted(set(numbers))}
        )

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
    shard = shards_of(model).get(name)
    full = numbers(model.full_name(name), kind, tensor.shape if shard is None else shard.full_shape(tensor))
    return full if shard is None else shard.of(full)


def build(kind, axes, mirrored=False, seed=None):
    """A model with an optimizer over dp; with `seed`, weights and biases that no other seed has."""
    model = RankModel(axes, mirrored)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(local(model, name, tensor, f"weight {seed}"))
    return model, kind(model, model.mesh.group("dp"), ZeroOptions(HYPER, bucket_bytes=200))


def step(model, optimizer, number):
    """One step with gradients that are drawn by name, a share of which each data rank has."""
    optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        grad = local(model, name, parameter, f"gradient {number}") / model.mesh.size("dp")
        if parameter.grad is None:
            parameter.grad = grad.clone()
        else:
            parameter.grad.copy_(grad)
    assert optimizer.step().stepped
