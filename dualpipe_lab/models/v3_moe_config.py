"""`V3MoEConfig`: the sizes of a V3-style model, and the rules by which they are sharded; needs no rank.

Chapter: book/ep/v3-moe.  In: sizes.  Out: checked sizes, numbers of parameters.
  parameters of an expert      3 h f_e
  experts active per token     k routed, and all shared ones, in each MoE layer
With softmax scores, qk_norm, and neither biases nor groups nor shared experts it is a Qwen3-MoE.
"""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

from dualpipe_lab.ep.expert_rules import check_divides, check_groups
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.tp.closed_forms import layer_parameters
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.rope_scaling import Scaling


@dataclass(frozen=True)
class V3MoEConfig:
    """Sizes of a full V3-style model; the defaults are tiny.

    Attributes:
        vocabulary_size, hidden_size, num_layers, num_heads, num_kv_heads, head_size, rope_base, eps: as in
            `LlamaConfig`.
        num_dense_layers: the number of first layers whose feed-forward network is dense, of `ffn_size`.
        ffn_size: of the dense layers.
        expert_ffn_size: of one expert.
        num_experts, num_experts_per_token, num_groups, num_groups_per_token, scale, scoring, normalise: as in
            `DeepSeekRouter`.
        selection_bias: whether a router's selection has biases, which move with the loads.
        num_shared_experts: experts that every token uses, computed as one network of their total width; 0 for none.
        balance: coefficient of the loss per sequence.
        latent: sizes of latent attention, as in V3; None for grouped-query attention.  With them every head has its own
            keys and values, and `num_kv_heads` and `head_size` are not used.
        qk_norm, rope_scaling: as in `LlamaConfig`; latents have norms of their own.

    >>> config = V3MoEConfig(hidden_size=7168, expert_ffn_size=2048, num_experts=256)
    >>> config.expert_parameters, 256 * config.expert_parameters
    (44040192, 11274289152)
    """

    vocabulary_size: int = 256
    hidden_size: int = 64
    num_layers: int = 3
    num_dense_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int | None = None
    ffn_size: int = 160
    expert_ffn_size: int = 32
    num_experts: int = 8
    num_experts_per_token: int = 2
    num_groups: int = 4
    num_groups_per_token: int = 2
    num_shared_experts: int = 1
    scale: float = 2.5
    balance: float = 1e-4
    rope_base: float = 10_000.0
    eps: float = 1e-6
    latent: LatentSizes | None = None
    scoring: Literal["softmax", "sigmoid"] = "sigmoid"
    normalise: bool = True
    selection_bias: bool = True
    qk_norm: bool = False
    rope_scaling: Scaling | None = None

    @property
    def expert_parameters(self) -> int:
        """The number of parameters of one expert."""
        return 3 * self.hidden_size * self.expert_ffn_size

    @property
    def shared_ffn_size(self) -> int:
        """The width of the shared experts together, which every token uses."""
        return self.num_shared_experts * self.expert_ffn_size

    @cached_property
    def dense(self) -> LlamaConfig:
        """The config of a Llama with these sizes: norms, embedding, head, and the heads of attention as they attend."""
        heads = (self.num_kv_heads, self.head_size) if self.latent is None else (self.num_heads, self.latent.key)
        return LlamaConfig(
            self.vocabulary_size, self.hidden_size, self.ffn_size, self.num_layers, self.num_heads, *heads,
            self.rope_base, self.eps, self.qk_norm, rope_scaling=self.rope_scaling,
        )  # fmt: skip

    @cached_property
    def layer_costs(self) -> tuple[int, ...]:
        """The cost of each layer for `pp.partition`: the parameters that a token uses.

        >>> V3MoEConfig(hidden_size=8, expert_ffn_size=4, ffn_size=16, num_experts=4).layer_costs
        (592, 528, 528)
        """
        used = self.num_experts_per_token * self.expert_ffn_size + self.shared_ffn_size
        dense = self._layer_parameters(self.ffn_size)
        sparse = self._layer_parameters(used) + self.num_experts * self.hidden_size
        return (dense,) * self.num_dense_layers + (sparse,) * (self.num_layers - self.num_dense_layers)

    def _layer_parameters(self, ffn_size: int) -> int:
        if self.latent is not None:
            attention = self.latent.parameters(self.hidden_size, self.num_heads)
            return attention + (3 * ffn_size + 2) * self.hidden_size
        heads = (self.num_heads, self.num_kv_heads, self.dense.size_of_head)
        return layer_parameters(self.hidden_size, ffn_size, *heads, 1)

    def check(self, tp_size: int = 1, ep_size: int = 1, cp_size: int = 1) -> None:
        """Refuse sizes that do not fit together or do not divide; ValueError names the rule and the values."""
        self._check_latent(tp_size, cp_size)
        self.dense.check(tp_size)
        if not 0 <= self.num_dense_layers <= self.num_layers or self.num_shared_experts < 0:
            raise ValueError(f"dense layers are some of the layers, and nothing is below 0, got {self}")
        if not (0 <= self.balance < inf and self.expert_ffn_size >= 1):
            raise ValueError(
                f"a balance loss has a finite weight of at least 0, and an expert a width of at least 1, got balance="
                f"{self.balance} and expert_ffn_size={self.expert_ffn_size}"
            )
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"a token uses 1..{self.num_experts} of {self.num_experts} experts, got num_experts_per_token="
                f"{self.num_experts_per_token}"
            )
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring is 'softmax' or 'sigmoid', got {self.scoring!r}")
        if self.normalise and self.num_experts_per_token == 1:
            raise ValueError(
                "the normalised weight of a single expert is 1 whatever its logit is, so the router would get no "
                "gradient, got num_experts_per_token=1 and normalise=True; use normalise=False"
            )
        groups = self.num_groups, self.num_groups_per_token
        check_groups(self.num_experts, self.num_experts_per_token, *groups)
        check_divides(self.num_experts, ep_size)

    def _check_latent(self, tp_size: int, cp_size: int) -> None:
        if self.latent is None:
            return
        self.latent.check()
        if self.qk_norm:
            raise ValueError("latents have norms of their own, got qk_norm=True; leave one out, qk_norm or latent")
        heads = self.num_heads // tp_size
        if cp_size > 1 and self.latent.value > self.latent.key and not self.latent.is_shorter(heads):
            raise ValueError(
                f"keys and values travel round the ring of cp in one width, that of keys, got value={self.latent.value}"
                f", keys of {self.latent.key} and {heads} heads on a rank; use cp 1, or a latent that is shorter than "
                "the heads"
            )
