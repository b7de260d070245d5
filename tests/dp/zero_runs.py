"""A model with every kind of parameter, and its training by each stage of ZeRO and by one process."""

import torch
from models import grads, make_batch
from torch import nn

from dualpipe_lab.dp.adam import AdamW
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.sharding import shard_slice

HYPER = {"lr": 0.01, "weight_decay": 0.1}


class Blocks(nn.Module):
    """Three units of odd sizes; the head is tied to the embedding, across units."""

    def __init__(self, dtype=torch.float64, tied=True, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.blocks[1][0].bias.requires_grad_(False)
        self.blocks[2].unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(5, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    @property
    def units(self):
        return [self.embedding, *self.blocks, self.head]


class Rare(Blocks):
    """With a weight that batches with token 6 use and no other, so that ranks use different parameters."""

    def __init__(self, dtype=torch.float64, **options):
        super().__init__(dtype, **options)
        self.rare = nn.Parameter(torch.linspace(0.5, 1.5, 7, dtype=dtype))

    def forward(self, tokens):
        scores, rows = super().forward(tokens), (tokens == 6).any(-1)
        return torch.where(rows[:, None, None], scores * self.rare, scores) if rows.any() else scores


def reference_grads(tokens, targets):
    """Gradients of the mean over all valid tokens, on one process."""
    model = Rare()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    return grads(model)


def build(stage, model, options, reshard=True):
    options = {"reduce": "sum", **options}  # the losses of `train` are shares of the batch's
    if stage is Zero3:
        return Zero3(model, units=model.units, **options, reshard_after_forward=reshard)
    return stage(model, **options)


def train(optimizer, rows, batches, num_microbatches, **options):
    """Steps on this rank's rows of each batch, in microbatches; every rank runs the model on every microbatch."""
    model = optimizer.module
    for tokens, targets in batches:
        num_tokens = int((targets != -100).sum())
        optimizer.zero_grad(num_backwards=num_microbatches)
        for m in range(num_microbatches):
            part = range(len(tokens))[rows][shard_slice(len(tokens[rows]), num_microbatches, m)]
            x, y = (tokens[part], targets[part]) if len(part) else (tokens[:1], torch.full_like(targets[:1], -100))
            nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").div(num_tokens).backward()
        optimizer.step(**options)


def reference(batches, max_norm=None, kind=Blocks):
    """The same on one process: the whole batch at once, AdamW on whole parameters."""
    model = kind()
    optimizer, norms = AdamW(model.parameters(), **HYPER), []
    for tokens, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            if parameter.grad is None:  # what nobody used has gradient 0, and decays
                parameter.grad = torch.zeros_like(parameter)
        if max_norm:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


BATCHES = [make_batch(rows=6, seed=seed) for seed in range(3)]


STAGES = [DDP, Zero1, Zero2, Zero3]
