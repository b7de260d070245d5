"""Right answers of another style to the exercises on V-shapes."""

RIGHT = {
    "v_shapes-2": {
        "B where W follows at once": [("0I0 0W0", "0B0"), ("0I2 0W2", "0B2")],
        "one text of three lines": [
            ("rows = [\n", "rows = '''\n"),
            ('    "', ""),
            ('",\n', "\n"),
            ("\n]", "\n'''"),
        ],
    },
    "v_shapes-3": {
        "one number to start from": """
def v_step(rank, world_size, near, far, batch, like):
    first, tip, m = rank == 0, rank + 1 == world_size, len(batch)
    for x, target in batch:
        x = x if first else receive(like, rank - 1)
        x.requires_grad_(not first)
        y, below = near(x)
        if tip:
            turned = y.detach().clone()
        else:
            comm.isend(y.detach(), rank + 1).wait()
            turned = receive(like, rank + 1)
        turned.requires_grad_()
        z, above = far(turned)
        if first:
            total = (mse_loss(z, target) + above) / m
        else:
            comm.send(z.detach(), rank - 1)
            total = (z * receive(like, rank - 1)).sum() + above / m
        total.backward()
        if tip:
            dy = turned.grad
        else:
            comm.send(turned.grad, rank + 1)
            dy = receive(like, rank + 1)
        ((y * dy).sum() + below / m).backward()
        if not first:
            comm.send(x.grad, rank - 1)
""",
        "gradients asked for, and added by hand": """
def v_step(rank, world_size, near, far, batch, like):
    first, tip = rank == 0, rank == world_size - 1
    one = torch.ones((), dtype=like.dtype) / len(batch)

    def backward(stage, x, outputs, grads):
        wanted = [*stage.parameters(), *([x] if x.requires_grad else [])]
        found = torch.autograd.grad(outputs, wanted, grads)
        for parameter, grad in zip(stage.parameters(), found):
            parameter.grad += grad
        return found[-1]

    for x, target in batch:
        x = x if first else receive(like, rank - 1).requires_grad_()
        below = near(x)
        if not tip:
            comm.send(below[0].detach(), rank + 1)
        middle = (below[0].detach() if tip else receive(like, rank + 1)).requires_grad_()
        z, penalty = far(middle)
        if first:
            grad = backward(far, middle, (mse_loss(z, target), penalty), (one, one))
        else:
            comm.send(z.detach(), rank - 1)
            grad = backward(far, middle, (z, penalty), (receive(like, rank - 1), one))
        if not tip:
            comm.send(grad, rank + 1)
            grad = receive(like, rank + 1)
        dx = backward(near, x, below, (grad, one))
        if not first:
            comm.send(dx, rank - 1)
""",
    },
}
