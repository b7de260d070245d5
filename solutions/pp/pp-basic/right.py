"""Right answers of another style to the exercises on PP basic."""

RIGHT = {
    "pp_basic-4": {
        "a header of bytes": """
import struct

import torch

from dualpipe_lab import comm

FORM = "<bb8q"
KINDS = [torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def send_tensor(x, dst, tag):
    packed = struct.pack(FORM, KINDS.index(x.dtype), x.ndim, *x.shape, *[0] * (8 - x.ndim))
    header = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    works = (comm.isend(header, dst, tag=tag),)
    return works if x.numel() == 0 else (*works, comm.isend(x.detach().clone().contiguous(), dst, tag=tag))


def recv_tensor(src, tag):
    header = torch.zeros(struct.calcsize(FORM), dtype=torch.uint8)
    comm.recv(header, src, tag=tag)
    kind, ndim, *shape = struct.unpack(FORM, bytes(header.tolist()))
    found = torch.zeros(shape[:ndim], dtype=KINDS[kind])
    if found.numel() > 0:
        comm.recv(found, src, tag=tag)
    return found
""",
        "also what is empty, and sizes first": """
import torch
from torch import Tensor

from dualpipe_lab.comm import irecv, isend

NAMES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "bool"]


def send_tensor(x: Tensor, dst: int, tag: int) -> list:
    header = torch.full((12,), -1)
    for place, size in enumerate(x.shape):
        header[place] = size
    header[-1] = NAMES.index(str(x.dtype).split(".")[1])
    flat = x.detach().flatten().contiguous()
    return [isend(header, dst, tag), isend(flat, dst, tag)]


def recv_tensor(src: int, tag: int) -> Tensor:
    header = torch.empty(12, dtype=torch.long)
    irecv(header, src, tag).wait()
    shape = [size for size in header[:-1].tolist() if size >= 0]
    number = 1
    for size in shape:
        number *= size
    flat = torch.empty(number, dtype=getattr(torch, NAMES[header[-1]]))
    irecv(flat, src, tag).wait()
    return flat.reshape(shape)
""",
    },
    "pp_basic-3": {
        "without an outbox": [
            ("    outbox = torch.zeros_like(like)\n", ""),
            ("outbox.copy_(y.detach())\n        comm.send(outbox, rank + 1)", "comm.send(y.detach(), rank + 1)"),
            ("outbox.copy_(x.grad)\n        comm.send(outbox, rank - 1)", "comm.send(x.grad, rank - 1)"),
        ],
        "gradients by hand": """
def pipeline_step(rank, world_size, stage, x, target, like):
    weights = list(stage.parameters())
    if rank > 0:
        comm.irecv(x := torch.empty_like(like), rank - 1).wait()
    x = x.detach().requires_grad_()
    y = stage(x)
    if rank == world_size - 1:
        dx, *grads = torch.autograd.grad(((y - target) ** 2).mean(), [x, *weights])
    else:
        sending = comm.isend(y.detach().clone(), rank + 1)
        comm.recv(dy := torch.empty_like(like), rank + 1)
        sending.wait()
        dx, *grads = torch.autograd.grad(y, [x, *weights], dy)
    for weight, grad in zip(weights, grads):
        weight.grad = grad if weight.grad is None else weight.grad + grad
    if rank > 0:
        comm.send(dx, rank - 1)
""",
    },
}
