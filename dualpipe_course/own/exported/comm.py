"""Messages between ranks: the six functions that the parts call, over torch.distributed on GLOO.

GLOO has tags and lets messages cross, which the parts need and NCCL has not; a tensor of a GPU is copied through the
host, and what is measured contains that copy.
"""

import torch
import torch.distributed as dist


class Work:
    """A message under way; until `wait()` its tensor may neither be read nor changed."""

    def __init__(self, work, host, target=None):
        self.work, self.host, self.target = work, host, target

    def wait(self):
        self.work.wait()
        if self.target is not None:
            self.target.copy_(self.host)


def isend(tensor, dst, tag=0):
    host = tensor.detach().cpu()
    return Work(dist.isend(host, dst, tag=tag), host)


def irecv(tensor, src, tag=0):
    host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
    return Work(dist.irecv(host, src, tag=tag), host, None if host is tensor else tensor)


def send(tensor, dst, tag=0):
    isend(tensor, dst, tag).wait()


def recv(tensor, src, tag=0):
    irecv(tensor, src, tag).wait()


get_rank, get_world_size = dist.get_rank, dist.get_world_size
