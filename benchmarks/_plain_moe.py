"""A layer of experts as one writes it with torch alone: functional collectives, a loop over experts, autograd."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional


class PlainExperts(nn.Module):
    """SwiGLU experts, E / e on each rank of the world: `gate_EFD`, `up_EFD`, `down_EDF`."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(weight.detach().clone()) for weight in (gate, up, down))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """`y_TD` of `x_TD`, `weights_TK` and `experts_TK`."""
        world, share, top_k = dist.get_world_size(), len(self.gate), experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        sends = torch.bincount(experts.flatten(), minlength=world * share)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        out_rows, in_rows = (table.view(world, share).sum(1).tolist() for table in (sends, receives))
        rows = functional.all_to_all_single_autograd(x[order // top_k], in_rows, out_rows, dist.group.WORLD)
        blocks = (1 * rows).split(receives.tolist())  # by source, then by expert
        done = [self.expert(torch.cat(blocks[expert::share]), expert) for expert in range(share)]
        sizes = receives.view(world, share).t().tolist()
        parts = [part.split(size) for part, size in zip(done, sizes, strict=True)]
        back = torch.cat([parts[expert][source] for source in range(world) for expert in range(share)])
        back = 1 * functional.all_to_all_single_autograd(back, out_rows, in_rows, dist.group.WORLD)
        return (weights.unsqueeze(-1) * back[order.argsort()].view(*experts.shape, -1)).sum(1)

    def expert(self, rows: Tensor, index: int) -> Tensor:
        """The rows of one expert through it."""
        inner = nn.functional.silu(rows @ self.gate[index].t()) * (rows @ self.up[index].t())
        return inner @ self.down[index].t()
