"""A small Llama with experts in plain torch on one process, beside which the parts are judged; it knows none of them.

In: seeds.  Out: weights by layer and name, batches, and a training: losses, first gradients, weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from torch.optim.adam import adam

WORDS, WIDTH, HIDDEN, HEADS, EXPERTS, EXPERT_HIDDEN = 11, 8, 12, 4, 8, 6
ROUTE = (3, 4, 2)  # experts of a token, groups of experts, groups that are kept
LR, BETAS, EPS = 3e-2, (0.9, 0.999), 1e-8
CUT = {"q": 0, "k": 0, "v": 0, "o": 1, "up": 0, "down": 1}  # the dimension along which tensor parallelism cuts

Weights = dict[str, Any]  # of a layer: tensors, and lists of them for experts
Name = tuple[int, str, int | None]  # layer, weight, expert
Batch = tuple[Tensor, Tensor]  # words and targets, (microbatches, tokens)


class Trained(NamedTuple):
    """What a training leaves: the losses, the raw gradients of the first step, the weights."""

    losses: list[float]
    first: dict[Name, Tensor]
    weights: dict[Name, Tensor]


def make_layers(num_layers: int, with_experts: bool = True, seed: int = 0) -> list[Weights]:
    """The weights of every layer by name; the first has the table, the last the norm and the head."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    layers = []
    for _ in range(num_layers):
        w: Weights = {name: 1 + 0.1 * draw(WIDTH) for name in ("norm1", "norm2")}
        w |= {name: draw(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
        w |= {"up": draw(HIDDEN, WIDTH), "down": draw(WIDTH, HIDDEN)}
        if with_experts:
            w |= {"router": draw(EXPERTS, WIDTH), "bias": 0.3 * draw(EXPERTS)}
            w |= {name: [draw(EXPERT_HIDDEN, WIDTH) for _ in range(EXPERTS)] for name in ("gates", "ups")}
            w["downs"] = [draw(WIDTH, EXPERT_HIDDEN) for _ in range(EXPERTS)]
        layers.append(w)
    layers[0]["embed"] = draw(WORDS, WIDTH)
    layers[-1] |= {"norm3": 1 + 0.1 * draw(WIDTH), "head": draw(WORDS, WIDTH)}
    return layers


def make_batch(num_microbatches: int, num_tokens: int, step: int = 0) -> Batch:
    """Words and the words to be predicted; the last microbatch has none, and others miss some."""
    generator = torch.Generator().manual_seed(100 + step)
    ids, targets = torch.randint(WORDS, (2, num_microbatches, num_tokens), generator=generator)
    targets[:, ::3] = -100
    targets[-1] = -100
    return ids, targets


def leaves(layers: Sequence[Mapping[str, Any]]) -> dict[Name, Tensor]:
    """All weights that learn, by layer and name; of experts one by one."""
    found: dict[Name, Tensor] = {}
    for number, w in enumerate(layers):
        for name, value in w.items():
            is_list = isinstance(value, list | tuple)
            for place, leaf in enumerate(value if is_list else [value]):
                if name != "bias":
                    found[number, name, place if is_list else None] = leaf
    return found


def train(layers: Sequence[Weights], batches: Sequence[Batch]) -> Trained:
    """Adam on the mean over all targets of a batch, one batch per step."""
    weights = leaves(layers)
    for leaf in weights.values():
        leaf.requires_grad_()
    moments = [[torch.zeros_like(leaf) for leaf in weights.values()] for _ in BETAS]
    steps = [torch.zeros(()) for _ in weights]
    losses: list[float] = []
    first: dict[Name, Tensor] = {}
    for ids, targets in batches:
        loss = cross_entropy(logits(layers, ids).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in weights.values()]
        first = first or dict(zip(weights, grads, strict=True))
        with torch.no_grad():  # the class torch.optim.Adam imports torch's compiler, some seconds
            adam(
                list(weights.values()), grads, *moments, [], steps, foreach=False,
                amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=LR, weight_decay=0.0, eps=EPS, maximize=False,
            )  # fmt: skip
        for leaf in weights.values():
            leaf.grad = None
        losses.append(float(loss.detach()))
    return Trained(losses, first, {name: leaf.detach() for name, leaf in weights.items()})


def logits(layers: Sequence[Mapping[str, Any]], ids: Tensor) -> Tensor:
    """(..., tokens) -> (..., tokens, words)."""
    x = layers[0]["embed"][ids]
    for w in layers:
        x = layer(x, w)
    return rms(x, layers[-1]["norm3"]) @ layers[-1]["head"].mT


def layer(x: Tensor, w: Mapping[str, Any]) -> Tensor:
    """(..., tokens, width)."""
    x, h = before_experts(x, w)
    x = x + silu(h @ w["up"].mT) @ w["down"].mT
    return x + experts(h, w) if "router" in w else x


def before_experts(x: Tensor, w: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """After attention: x, and its norm, which router, experts and MLP read."""
    x = x + attention(rms(x, w["norm1"]), w)
    return x, rms(x, w["norm2"])


def rms(x: Tensor, scale: Tensor) -> Tensor:
    """RMSNorm."""
    return scale * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def attention(x: Tensor, w: Mapping[str, Any]) -> Tensor:
    """Causal attention of all heads, (..., tokens, width)."""
    q, k, v = ((x @ w[name].mT).unflatten(-1, (HEADS, -1)).transpose(-3, -2) for name in "qkv")
    return attend(q, k, v).transpose(-3, -2).flatten(-2) @ w["o"].mT


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(..., heads, tokens, size): causal, scaled by size^-0.5."""
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1) @ v


def experts(h: Tensor, w: Mapping[str, Any]) -> Tensor:
    """Every expert on every token, weighted by what V3's router gives it: 0 if it is not chosen."""
    gates = gates_of(h, w)
    outputs = [
        (silu(h @ gate.mT) * (h @ up.mT)) @ down.mT
        for gate, up, down in zip(w["gates"], w["ups"], w["downs"], strict=True)
    ]
    return (torch.stack(outputs, -2) * gates[..., None]).sum(-2)


def gates_of(h: Tensor, w: Mapping[str, Any]) -> Tensor:
    """V3's weight of every expert for every token, 0 if it is not chosen: (..., tokens, experts)."""
    k, num_groups, num_kept = ROUTE
    affinity = (h @ w["router"].mT).sigmoid()
    groups = (affinity + w["bias"]).detach().unflatten(-1, (num_groups, -1))
    best = groups.sort(-1, descending=True).values[..., :2].sum(-1).sort(-1, descending=True).indices[..., :num_kept]
    is_kept = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
    scores = groups.where(is_kept[..., None], torch.tensor(-torch.inf)).flatten(-2)
    chosen = scores.sort(-1, descending=True).indices[..., :k]
    gates = affinity * torch.zeros_like(affinity, dtype=torch.bool).scatter(-1, chosen, True)
    return gates / gates.sum(-1, keepdim=True)
