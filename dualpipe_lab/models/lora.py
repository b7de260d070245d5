"""`add_lora`: freeze a model, and train two thin matrices beside each of its linear layers, on every cut of the model.

Chapter: book/whole/lora.  In: a model, or a rank's stages of it, and the width R.  Out: the same module, with adapters.
  y = x W^T + s (x A^T) B^T     A_RI drawn, B_OR zero, s = alpha / R: the first step starts from the model as it was
  u = x A^T     du = s dy B     dB = s dy^T u     dA = du^T x     dx += du A     no dW: 4 T I O of 6 T I O operations
            A_RI           B_OR           the sum over tp, of T R numbers
  column    replicated     like W, rows    of du, in the backward    dy_r B_r is rank r's summand of du
  row       like W, columns  replicated    of u, in the forward      x_r A_r^T is rank r's summand of u
Under sequence parallelism a gather and a reduce-scatter of tokens replace the sum, and the gradient of the replicated
half, of which each rank has its tokens' summand, is summed.
Elsewhere: peft `LoraConfig`, `lora.Linear`; Megatron-Bridge's LoRA `linear_in`, `linear_out`; d9d `LoRALinear`.
Source: Hu et al. 2021 (arXiv 2106.09685), sections 4.1 and 4.2.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.param_specs import full_name_of
from dualpipe_lab.tp.gqa import GroupedQueryAttention
from dualpipe_lab.tp.latent_attention import LatentAttention
from dualpipe_lab.tp.linear import ColumnParallelLinear, RowParallelLinear, ShardedLinear, weight_grad
from dualpipe_lab.tp.mappings import all_reduce_async, gather_output_grad, reduce_output
from dualpipe_lab.tp.shard import drawn

LAYERS = "q", "k", "v", "o", "gate", "up", "down"  # of a Llama
Linear: TypeAlias = nn.Linear | ShardedLinear


class LowRank(torch.autograd.Function):
    """s (x A^T) B^T beside a linear layer; the ranks of `tp` share the layer by rows or, `is_row`, by columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, *how: Any) -> Tensor:
        is_row, tp, _ = ctx.how = how
        u = linear(x, a)  # u_..SR of x_..SI and a_RI
        if tp is not None:  # row: the sum over the ranks; column: under sequence parallelism, the tokens of all
            u = (reduce_output if is_row else gather_output_grad)(u, tp)
        ctx.save_for_backward(x, a, b, u, scale)
        return linear(u, b).mul_(scale)  # y_..SO of b_OR

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, a, b, u, scale), (is_row, tp, replicas) = ctx.saved_tensors, ctx.how
        dy = scale * dy
        du = dy @ b
        if tp is not None:  # column: the sum over the ranks; row: under sequence parallelism, the tokens of all
            du = (gather_output_grad if is_row else reduce_output)(du, tp)
        da, db = weight_grad(du, x), weight_grad(dy, u)
        if tp is not None and tp.sequence_parallel:  # the replicated half has met this rank's tokens alone
            all_reduce_async(db if is_row else da, tp.group).wait()
        if replicas is not None:  # ranks with the same keys and values have a summand each
            all_reduce_async(db, replicas).wait()
        dx = du @ a if ctx.needs_input_grad[0] else None
        return dx, da, db, *[None] * 4


class LoRA(nn.Module):
    """The adapter of one linear layer: `a` [rank, in] and `b` [out, rank], of which one is sharded as the weight is."""

    def __init__(
        self, layer: Linear, full_name: str, rank: int, scale: float, seed: int, replicas: Group | None
    ) -> None:
        super().__init__()
        self.replicas, self.is_row = replicas, isinstance(layer, RowParallelLinear)
        # a part of every state dict and checkpoint, and in bits, since half() and the like round numbers alone
        bits = torch.tensor(scale, dtype=torch.float64, device=layer.weight.device).view(torch.int64)
        self.register_buffer("scale_bits", bits)
        self.tp = layer.tp if isinstance(layer, ShardedLinear) else None
        shard = layer.shards["weight"] if isinstance(layer, ShardedLinear) else None
        self.shards = {} if shard is None else {"a" if self.is_row else "b": shard}
        a = drawn(f"{full_name}.adapter.a", (rank, layer.in_features), seed)
        a = self.shards["a"].of(a) if "a" in self.shards else a
        self.a = nn.Parameter(a.to(layer.weight, copy=True, memory_format=torch.contiguous_format))
        self.b = nn.Parameter(layer.weight.new_zeros(len(layer.weight), rank))

    @property
    def scale(self) -> Tensor:
        """The scale s, one number in float64."""
        return self.get_buffer("scale_bits").view(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Return the update `y_..SO` of the layer's input `x_..SI`, both sharded as the layer has them."""
        tensors, kind = [x if x.dim() > 1 else x[None], self.a, self.b], x.device.type
        if torch.is_autocast_enabled(kind):
            tensors = [one.to(torch.get_autocast_dtype(kind)) for one in tensors]
        out: Tensor = LowRank.apply(*tensors, self.scale, self.is_row, self.tp, self.replicas)
        return out if x.dim() > 1 else out[0]


class AdaptedLinear(nn.Linear):
    """What `add_lora` makes of an `nn.Linear`, in place."""

    adapter: LoRA

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name, which a call may use)
        """Return `y_..O` of `x_..I`."""
        y: Tensor = super().forward(input) + self.adapter(input)
        return y


def add_lora(
    model: nn.Module, rank: int = 8, *, alpha: float = 16.0, layers: str | Sequence[str] = LAYERS, seed: int = 0
) -> None:
    """Freeze a model in place, and add a trained adapter to its linear layers of these names.

    Call it before an optimizer of this library takes the model.  It needs no message: any rank adapts what it holds.
    A layer is adapted where it is called; a forward that reads a layer's `weight` itself does not see the adapter.

    Args:
        model: a `Llama`, the `RankModel` of `build_stages`, or any module with `nn.Linear` layers.
        rank: of the update, R.
        alpha: the update is scaled by alpha / R.
        layers: names of layers within their modules.
        seed: of A, which is drawn by the layer's name in the full model, so every cut starts from the same numbers.
            Adapt own stages before they are cut, or in an `nn.ModuleDict` that gives them their full names.

    Raises:
        ValueError: a rank that is no whole number above 0, or an alpha that is no number; a name that no linear layer
            of this model has, or a layer of another class; a model with adapters; a tied weight.

    >>> model = nn.Sequential(nn.Linear(6, 4))
    >>> add_lora(model, rank=2, layers=["0"])
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['0.adapter.a', '0.adapter.b']
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or not isfinite(alpha):
        raise ValueError(f"an adapter has a whole rank of 1 or more, and a finite alpha, got {rank!r} and {alpha!r}")
    if any(isinstance(module, LoRA) for module in model.modules()):
        raise ValueError("the model has adapters; name all layers at once, or call merge_lora(model) first")
    found = _chosen(model, [layers] if isinstance(layers, str) else layers)
    full_name, replicas = full_name_of(model), _replicas(model)
    model.requires_grad_(False)
    for name, layer in found.items():
        layer.adapter = LoRA(layer, full_name(name), rank, alpha / rank, seed, replicas.get(layer))
        if isinstance(layer, nn.Linear):
            layer.__class__ = AdaptedLinear


def merge_lora(model: nn.Module) -> None:
    """Add each update to its layer's weight, W + s B A, and remove the adapters; no rank sends anything.

    Under ZeRO-3 call it inside of `with optimizer.gathered()`.  The weights stay frozen.
    """
    for layer in list(model.modules()):
        adapter = getattr(layer, "adapter", None)
        if isinstance(adapter, LoRA):
            with torch.no_grad():
                layer.weight.add_(adapter.scale * (adapter.b @ adapter.a))
            layer.adapter = None
            del adapter.a, adapter.b  # an optimizer that still has them refuses to go on
            if isinstance(layer, AdaptedLinear):
                layer.__class__ = nn.Linear


def _chosen(model: nn.Module, layers: Sequence[str]) -> dict[str, Linear]:
    """Return the layers of these names, or refuse them."""
    linear_layers, found = dict(_linear_layers(model)), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in layers and isinstance(module, Linear):
            if name not in linear_layers:
                raise ValueError(f"{name}, a {type(module).__name__}, may be read without a call; name other layers")
            found[name] = linear_layers[name]
    missing = set(layers) - {name.rpartition(".")[2] for name in found}
    if not found or (missing and layers is not LAYERS):
        known = sorted({name.rpartition(".")[2] for name in linear_layers})
        raise ValueError(f"layers={tuple(layers)} names a layer that the model has not; its linear layers are {known}")
    owners = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    if tied := [name for name, layer in found.items() if owners[layer.weight] > 1]:
        raise ValueError(
            f"the weight of {tied[0]} is another module's, too, and an update would reach both; leave it out"
        )
    return found


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yield the layers that can be adapted: no subclasses, and none whose weight is read without calling the layer."""
    read: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, LatentAttention):
            read.add(module.kv_up)
        if isinstance(module, nn.TransformerEncoderLayer):  # in eval
            read |= {module.linear1, module.linear2}
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, ColumnParallelLinear, RowParallelLinear) and module not in read:
            yield name, cast(Linear, module)


def _replicas(model: nn.Module) -> dict[nn.Module, Group | None]:
    """Return the ranks that hold the same keys and values, by layer."""
    attentions = [module for module in model.modules() if isinstance(module, GroupedQueryAttention)]
    return {layer: module.replicas for module in attentions for layer in (module.k, module.v)}
