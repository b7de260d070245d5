"""A tensor that says its own shape and type."""

import torch
from torch import Tensor

from dualpipe_lab.comm import Work, irecv, isend

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
MOST = 8  # dimensions


def send_tensor(x: Tensor, dst: int, tag: int) -> list[Work]:
    """Start to send a header and, unless it is empty, x itself; return what was started."""
    x = x.detach().contiguous()
    header = [TYPES.index(x.dtype), x.dim(), *x.shape]
    works = [isend(torch.tensor(header + [0] * (MOST + 2 - len(header))), dst, tag)]
    if x.numel():
        works.append(isend(x, dst, tag))
    return works


def recv_tensor(src: int, tag: int) -> Tensor:
    """Wait for a tensor of any shape and type."""
    header = torch.empty(MOST + 2, dtype=torch.int64)  # the one size that both ranks know
    irecv(header, src, tag).wait()
    number, dim, *shape = header.tolist()
    x = torch.empty(shape[:dim], dtype=TYPES[number])
    if x.numel():
        irecv(x, src, tag).wait()
    return x
