"""The same prediction of a second token in plain torch, for one process.

Chapter: book/whole/two-tokens.  In: the config and the weight of `MultiTokenStage`.  Out: a reference.
Autograd derives every backward here.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from dualpipe_lab.dp.data_parallel import IGNORED
from dualpipe_lab.models.plain_v3_moe import PlainV3Layer, PlainV3MoE
from dualpipe_lab.models.v3_moe_config import V3MoEConfig


class PlainMultiToken(PlainV3MoE):
    """A V3-style model in one process that is trained to predict a second token; names as in `build_stages`.

    Args:
        config, dtype, device: as in `PlainV3MoE`.
        weight: lambda, of the second token's loss.
    """

    def __init__(
        self,
        config: V3MoEConfig,
        weight: float,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(config, dtype, device)
        hidden, where = config.hidden_size, self.embedding.weight.device
        parts = {
            name: nn.RMSNorm(hidden, config.eps, dtype=dtype) for name in ("hidden_norm", "embedding_norm", "norm")
        }
        parts |= {"projection": nn.Linear(2 * hidden, hidden, False, dtype=dtype)}
        self.weight, self.multi_token = weight, nn.ModuleDict(parts | {"layer": PlainV3Layer(config, False, dtype)})
        self.to(where)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss of `targets_BS`, lambda times that of the second tokens, and the balance losses."""
        x, balance = self._hidden_and_balance(ids)
        mean = cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        second, last = self.second(x, ids)
        loss = cross_entropy(
            second[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        share = self.weight / max(int((targets != IGNORED).sum()), 1)
        return mean + share * loss + self.config.balance * (balance + last)

    def second(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the second token's `logits_BSV`, and its layer's balance loss, from the hidden states `x_BSD`."""
        part, after = self.multi_token, self.embedding(pad(ids[:, 1:], (0, 1)))
        x = part["projection"](torch.cat((part["hidden_norm"](x), part["embedding_norm"](after)), -1))
        x, balance = part["layer"](x, torch.arange(ids.shape[1], device=ids.device))
        return self.head(part["norm"](x)), balance
