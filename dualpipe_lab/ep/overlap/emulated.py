"""A small MoE model with known times: real tensors, declared compute times, a link of the speed that fits.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.  In: sizes.  Out: layers, a link, ticks.
  bytes of an all-to-all   (e - 1) / e * T k h beta sent by every rank: the routes are even and fixed
  link                     the speed at which these bytes take the given milliseconds
The time of compute is declared (`ticks`): ranks sleep, or advance the virtual clock.  Everything else is real.
Source of fixed routes: Roller et al. 2021 (arXiv 2106.04426), hash layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dualpipe_lab.ep.moe import ExpertParallel, Experts
from dualpipe_lab.ep.overlap.executor import OverlappableLayer
from dualpipe_lab.ep.router import TopKRouter, expert_weights
from dualpipe_lab.launch.context import device
from dualpipe_lab.launch.emulator import Link

MS = 1_000_000  # nanoseconds


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: T tokens per rank and microbatch, h hidden, f inner, E experts, k per token.

    >>> Sizes().num_bytes(ep_size=2)
    3072
    """

    tokens: int = 24
    hidden: int = 16
    ffn: int = 12
    experts: int = 4
    top_k: int = 2

    def num_bytes(self, ep_size: int) -> int:
        """Return the bytes that each rank sends in one all-to-all, in float64."""
        return (ep_size - 1) * self.tokens * self.top_k * self.hidden * 8 // ep_size

    def link(self, milliseconds: float, ep_size: int = 2) -> Link:
        """Return a link on which an all-to-all takes `milliseconds`."""
        return Link(gbps=self.num_bytes(ep_size) * 8 / (milliseconds * MS))


class SelfAttention(nn.Module):
    """Causal self-attention with one head, and its residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(0).chunk(3, dim=-1)
        a: Tensor = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True)[0])
        return a


@dataclass(frozen=True)
class LayerWeights:
    """The full weights of one layer."""

    attention: SelfAttention
    router: TopKRouter
    gate: Tensor
    up: Tensor
    down: Tensor


def make_weights(num_layers: int, sizes: Sizes | None = None, seed: int = 0) -> list[LayerWeights]:
    """Draw the full weights of a model in float64 on the CPU; equal arguments give equal weights on every device.

    >>> len(make_weights(3))
    3
    """
    s = sizes or Sizes()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [
            LayerWeights(
                SelfAttention(s.hidden).to(device(), torch.float64),
                TopKRouter(s.hidden, s.experts, s.top_k, normalise=s.top_k > 1).double(),
                *(
                    torch.randn(s.experts, *shape, dtype=torch.float64, device="cpu").div_(s.hidden**0.5).to(device())
                    for shape in ((s.ffn, s.hidden), (s.ffn, s.hidden), (s.hidden, s.ffn))
                ),
            )
            for _ in range(num_layers)
        ]


def make_layers(
    weights: Sequence[LayerWeights], ep: ExpertParallel | None = None, even: Sizes | None = None
) -> list[OverlappableLayer]:
    """Return the layers of a model with the experts sharded, on the device of the rank.

    Args:
        weights: the full weights of all layers, on any device; attention and router are moved, not copied.
        ep: the groups of the experts (default: the world holds each expert once).
        even: the sizes of a microbatch, to send its tokens to all experts in turn, whatever the router chooses.
    """
    fixed = None if even is None else even_choices(even)
    ep = ep or ExpertParallel()
    return [
        OverlappableLayer(
            w.attention.to(device()), w.router.to(device()), Experts.from_full(w.gate, w.up, w.down, ep), fixed
        )
        for w in weights
    ]


def even_choices(sizes: Sizes) -> Tensor:
    """Return `experts_TK` with all experts in turn.

    >>> even_choices(Sizes(tokens=3, experts=4, top_k=2)).tolist()
    [[0, 1], [2, 3], [0, 1]]
    """
    slots = torch.arange(sizes.tokens * sizes.top_k, device=device()) % sizes.experts
    return slots.view(sizes.tokens, sizes.top_k)


def single_process(weights: Sequence[LayerWeights], x: Tensor, fixed: Tensor | None = None) -> Tensor:
    """Return `y_TD` of the model on a single process, by autograd: the reference."""
    for w in weights:
        a = w.attention(x)
        routing = w.router(a)
        chosen = routing.indices if fixed is None else fixed
        weights_tk = expert_weights(routing.logits, chosen, w.router.scoring, w.router.normalise, w.router.scale)
        inner = torch.nn.functional.silu(torch.einsum("th,efh->tef", a, w.gate))
        inner = inner * torch.einsum("th,efh->tef", a, w.up)
        y = torch.einsum("tef,ehf->teh", inner, w.down)
        picked = y.gather(1, chosen.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
        x = a + (weights_tk.unsqueeze(-1) * picked).sum(1)
    return x
