"""Right answers of another style to the exercises on PP basic."""

RIGHT = {
    "pp_basic-2": {
        "the data as bytes": [
            ("comm.send(x.contiguous(), dst)", "comm.send(x.contiguous().flatten().view(torch.uint8), dst)"),
            (
                "comm.recv(x, src)",
                "comm.recv(flat := torch.empty(x.nbytes, dtype=torch.uint8), src)\n"
                "        x = flat.view(x.dtype).reshape(x.shape)",
            ),
        ],
        "also what is empty": [
            ("    if x.numel():\n        comm.send", "    if True:\n        comm.send"),
            ("    if x.numel():\n        comm.recv", "    if True:\n        comm.recv"),
            ("torch.zeros(8, dtype=torch.int64)", "torch.zeros(16, dtype=torch.int64)"),
            ("torch.empty(8, dtype=torch.int64)", "torch.empty(16, dtype=torch.int64)"),
        ],
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
