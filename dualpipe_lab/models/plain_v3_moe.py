"""The same V3-style model in plain torch, for one process, with or without the prediction of a second token.

Chapter: book/ep/v3-moe, book/whole/two-tokens.  In: the config of `V3MoE`, or a state dict.  Out: a reference.
Autograd derives every backward here, and experts run one after another.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention, silu

from dualpipe_lab.dp.data_parallel import IGNORE_INDEX
from dualpipe_lab.launch import context
from dualpipe_lab.models.plain_llama import PlainAttention, PlainMlp
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.rope import rope_cos_sin


class PlainRouter(nn.Linear):
    """A router with sigmoid or softmax scores; its bias, if it has one, takes part in the selection only."""

    selection_bias: Tensor | None

    def __init__(self, config: V3MoEConfig, dtype: torch.dtype | None) -> None:
        super().__init__(config.hidden_size, config.num_experts, False, dtype=dtype)
        self.config = config
        wide = torch.promote_types(self.weight.dtype, torch.float32)  # a bias near 1 moves by short steps
        bias = torch.zeros(config.num_experts, dtype=wide) if config.selection_bias else None
        self.register_buffer("selection_bias", bias, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `weights_TK`, `indices_TK` and `scores_TE` of `x_TD`."""
        logits = super().forward(x)
        scores = logits.sigmoid() if self.config.scoring == "sigmoid" else logits.softmax(1)
        selection = scores.detach() if self.selection_bias is None else scores.detach() + self.selection_bias
        selection = selection.unflatten(1, (self.config.num_groups, -1))
        best = selection.topk(min(2, selection.shape[2]), 2).values.sum(2)
        kept = torch.zeros_like(best).scatter(1, best.topk(self.config.num_groups_per_token, 1).indices, 1.0)
        selection = selection.masked_fill(kept.unsqueeze(2) == 0, -torch.inf).flatten(1)
        indices = selection.topk(self.config.num_experts_per_token, 1).indices
        chosen = scores.gather(1, indices)
        chosen = chosen / chosen.sum(1, keepdim=True) if self.config.normalise else chosen
        return self.config.scale * chosen, indices, scores


class PlainExperts(nn.Module):
    """The weights of all experts, stacked along the first dimension."""

    def __init__(self, config: V3MoEConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        count, hidden, inner = config.num_experts, config.hidden_size, config.expert_ffn_size
        self.gate = nn.Parameter(torch.empty(count, inner, hidden, dtype=dtype))
        self.up = nn.Parameter(torch.empty(count, inner, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, hidden, inner, dtype=dtype))


class PlainMoE(nn.Module):
    """A mixture-of-experts layer: router, experts, shared expert."""

    def __init__(self, config: V3MoEConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.router, self.experts = PlainRouter(config, dtype), PlainExperts(config, dtype)
        self.shared = None
        if config.num_shared_experts:
            self.shared = PlainMlp(replace(config.dense, ffn_size=config.shared_ffn_size), dtype)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `y_BSD` of `x_BSD`, and the mean balance loss per sequence; padding is neither routed nor counted."""
        is_token = x.new_ones(x.shape[:2], dtype=torch.bool) if padding is None else ~padding
        tokens = x[is_token]
        weights, indices, scores = self.router(tokens)
        y = torch.zeros_like(tokens) if self.shared is None else self.shared(tokens)
        for expert in range(len(self.experts.gate)):
            token, choice = (indices == expert).nonzero(as_tuple=True)
            routed = tokens[token]
            inner = silu(routed @ self.experts.gate[expert].t()) * (routed @ self.experts.up[expert].t())
            y = y.index_add(0, token, weights[token, choice, None] * (inner @ self.experts.down[expert].t()))
        lengths, sequence = is_token.sum(1), is_token.nonzero()[:, 0]  # the sequence of each token
        shares, hits = scores / scores.sum(1, keepdim=True), torch.zeros_like(scores).scatter(1, indices, 1.0)
        sums = [scores.new_zeros(len(x), scores.shape[1]).index_add(0, sequence, rows) for rows in (shares, hits)]
        per_sequence = (sums[0] * sums[1]).sum(1) / lengths.clamp(min=1).square()
        balance = scores.shape[1] / indices.shape[1] * per_sequence.sum() / lengths.count_nonzero().clamp(min=1)
        return torch.zeros_like(x).index_put((is_token,), y), balance


class PlainLatentAttention(nn.Module):
    """Latent attention, written as its equations: every head's keys and values are unfolded, and queries turned."""

    def __init__(self, config: V3MoEConfig, sizes: LatentSizes, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.sizes, self.rope_base, self.rope_scaling = sizes, config.rope_base, config.rope_scaling
        self.scale = sizes.key**-0.5 * (1.0 if config.rope_scaling is None else config.rope_scaling.score_factor)
        hidden, heads = config.hidden_size, config.num_heads
        if sizes.query_rank is not None:
            self.q_down = nn.Linear(hidden, sizes.query_rank, False, dtype=dtype)
            self.q_norm = nn.RMSNorm(sizes.query_rank, 1e-6, dtype=dtype)
        self.q_up = nn.Linear(sizes.query_rank or hidden, heads * sizes.key, False, dtype=dtype)
        self.kv_down = nn.Linear(hidden, sizes.cached, False, dtype=dtype)
        self.kv_norm = nn.RMSNorm(sizes.kv_rank, 1e-6, dtype=dtype)
        self.kv_up = nn.Linear(sizes.kv_rank, heads * (sizes.content + sizes.value), False, dtype=dtype)
        self.o = nn.Linear(heads * sizes.value, hidden, False, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return y_BSD of x_BSD and positions_S."""
        sizes = self.sizes
        short = x if sizes.query_rank is None else self.q_norm(self.q_down(x))
        latent, shared = self.kv_down(x).split([sizes.kv_rank, sizes.position], -1)
        content, turning = self.q_up(short).unflatten(-1, (-1, sizes.key)).split([sizes.content, sizes.position], -1)
        unfolded = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, sizes.content + sizes.value))
        k, v = unfolded.split([sizes.content, sizes.value], -1)
        cosines, sines = rope_cos_sin(positions, sizes.position, self.rope_base, x.dtype, self.rope_scaling)
        angles = torch.complex(cosines, sines).unsqueeze(1)
        q = torch.cat((content, _turned(turning, angles)), -1)
        k = torch.cat((k, _turned(shared.unsqueeze(2), angles).expand(-1, -1, k.shape[2], -1)), -1)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Multiply neighbouring features of x_BSHK, as complex numbers, by those of the tokens' angles."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * angles).flatten(-2)


class PlainV3Layer(nn.Module):
    """One transformer layer: attention, then a dense or mixture-of-experts feed-forward network."""

    def __init__(self, config: V3MoEConfig, is_dense: bool, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.eps, dtype=dtype)
        latent, dense = config.latent, config.dense
        self.attention = PlainLatentAttention(config, latent, dtype) if latent else PlainAttention(dense, dtype)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.eps, dtype=dtype)
        self.mlp = PlainMlp(config.dense, dtype) if is_dense else PlainMoE(config, dtype)

    def forward(self, x: Tensor, positions: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return `y_BSD` of `x_BSD`, and the balance loss per sequence; None in a dense layer."""
        x = x + self.attention(self.attention_norm(x), positions)
        normal = self.mlp_norm(x)
        y = self.mlp(normal, padding) if isinstance(self.mlp, PlainMoE) else self.mlp(normal)
        return (x + y, None) if isinstance(y, Tensor) else (x + y[0], y[1])


class PlainV3MoE(nn.Module):
    """The full V3-style model in one process, in plain torch; its parameters have the names of `V3MoE`'s.

    Arguments as in `PlainLlama`; the weights of the experts are not drawn but loaded.
    """

    def __init__(
        self, config: V3MoEConfig, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.hidden_size, dtype=dtype)
        dense = (index < config.num_dense_layers for index in range(config.num_layers))
        self.layers = nn.ModuleList(PlainV3Layer(config, is_dense, dtype) for is_dense in dense)
        self.norm = nn.RMSNorm(config.hidden_size, config.eps, dtype=dtype)
        self.head = nn.Linear(config.hidden_size, config.vocabulary_size, False, dtype=dtype)
        self.to(context.device() if device is None else device)

    def forward(self, ids: Tensor) -> Tensor:
        """Return `logits_BSV` of `ids_BS`."""
        logits: Tensor = self.head(self.norm(self._hidden_and_balance(ids)[0]))
        return logits

    def loss(self, ids: Tensor, targets: Tensor, padding: Tensor | None = None) -> Tensor:
        """Compute the mean loss of `targets_BS`, plus the weighted balance losses per sequence.

        `padding_BS`: True where a position is padding, as in `V3MoE.forward`.
        """
        x, balance = self._hidden_and_balance(ids, padding)
        mean = cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        return mean + self.config.balance * balance

    def _hidden_and_balance(self, ids: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output of the last layer, and the sum of the layers' balance losses."""
        positions, x = torch.arange(ids.shape[1], device=ids.device), self.embedding(ids)
        balance = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x, positions, padding)
            balance = balance if loss is None else balance + loss
        return x, balance


class PlainMTP(PlainV3MoE):
    """A V3-style model in one process that is trained to predict a second token; names as in `build_stages`.

    Args:
        config, dtype: as in `PlainV3MoE`.
        weight: lambda, of the second token's loss.
    """

    def __init__(
        self,
        config: V3MoEConfig,
        weight: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, dtype)
        hidden, where = config.hidden_size, self.embedding.weight.device
        norms = "hidden_norm", "embedding_norm", "norm"
        parts: dict[str, nn.Module] = {name: nn.RMSNorm(hidden, config.eps, dtype=dtype) for name in norms}
        parts |= {"projection": nn.Linear(2 * hidden, hidden, False, dtype=dtype)}
        self.weight, self.mtp = weight, nn.ModuleDict(parts | {"layer": PlainV3Layer(config, False, dtype)})
        self.to(where)

    def loss(self, ids: Tensor, targets: Tensor, padding: Tensor | None = None) -> Tensor:
        """Compute the mean loss of `targets_BS`, lambda times that of the second tokens, and the balance losses."""
        x, balance = self._hidden_and_balance(ids, padding)
        mean = cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        second, last = self.second(x, ids, padding)
        loss = cross_entropy(
            second[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        share = self.weight / max(int((targets != IGNORE_INDEX).sum()), 1)
        return mean + share * loss + self.config.balance * (balance + last)

    def second(self, x: Tensor, ids: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the second token's `logits_BSV`, and its layer's balance loss, from the hidden states `x_BSD`."""
        part, after = self.mtp, self.embedding(pad(ids[:, 1:], (0, 1)))
        x = part["projection"](torch.cat((part["hidden_norm"](x), part["embedding_norm"](after)), -1))
        x, balance = part["layer"](x, torch.arange(ids.shape[1], device=ids.device), padding)
        return self.head(part["norm"](x)), balance
