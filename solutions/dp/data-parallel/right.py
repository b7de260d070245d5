"""Right answers of another style to the exercises on data parallelism."""

FLAT = """
import torch
from torch import no_grad, zeros

from mine.ring import all_gather, all_reduce


def num_tokens(targets, ranks):
    own = torch.tensor([[float((targets >= 0).sum())]], dtype=torch.float64)
    return all_gather(own, ranks).sum().item()


def share_of_loss(logits, targets, total):
    counts = targets >= 0
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1)
    return -(picked * counts).sum() / (total or 1)


def sum_gradients(parameters, ranks):
    parameters = list(parameters)
    flat = torch.cat([zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.flatten() for p in parameters])
    all_reduce(flat, ranks)
    with no_grad():
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = part.view_as(p).clone()
"""

STAR = """
import torch
import torch.nn.functional as F

from dualpipe_lab.comm import get_rank, recv, send


def add_up(x, ranks):
    if get_rank() == ranks[0]:
        part = torch.empty_like(x)
        for other in ranks[1:]:
            recv(part, other)
            x += part
        for other in ranks[1:]:
            send(x, other)
    else:
        send(x, ranks[0])
        recv(x, ranks[0])


def num_tokens(targets, ranks):
    count = torch.count_nonzero(targets + 100).double().reshape(1)
    add_up(count, ranks)
    return count.item()


def share_of_loss(logits, targets, total):
    valid = targets.ne(-100).nonzero().flatten()
    losses = F.cross_entropy(logits[valid], targets[valid], reduction="none")
    return losses.sum() * (1 / total if total else 0)


def sum_gradients(parameters, ranks):
    for p in parameters:
        p.grad = torch.zeros_like(p.data) if p.grad is None else p.grad.contiguous()
        add_up(p.grad, ranks)
"""

RIGHT = {
    "data_parallel-5": {"one flat sum, and the loss by hand": FLAT, "a star of messages for two or three": STAR},
    "data_parallel-3": {
        "scaled after the average": """
def backward_and_average(model, tokens, targets, average):
    logits = model(tokens).flatten(0, 1)
    cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum").backward()
    average(model)
    n = (targets != -100).sum()
    comm.all_reduce(n)
    for p in model.parameters():
        if p.requires_grad:
            p.grad *= comm.get_world_size()
            p.grad /= n
""",
        "losses one by one": """
def backward_and_average(model, tokens, targets, average):
    is_valid = targets.flatten() != -100
    mean_count = is_valid.double().sum()
    comm.all_reduce(mean_count, "avg")
    logits = model(tokens).flatten(0, 1)
    losses = cross_entropy(logits, targets.flatten().clamp(min=0), reduction="none")
    (losses * is_valid / mean_count).sum().backward()
    average(model)
""",
    },
}
