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
        "a leaf of its own on the tip": """
def v_step(rank, world_size, near, far, batch, like):
    first, tip = rank == 0, rank + 1 == world_size
    for x, target in batch:
        x = x if first else receive(like, rank - 1)
        x.requires_grad_(not first)
        y = near(x)
        if tip:
            turned = y.detach().clone()
        else:
            comm.isend(y.detach(), rank + 1).wait()
            turned = receive(like, rank + 1)
        turned.requires_grad_()
        z = far(turned)
        if first:
            z, dz = mse_loss(z, target), torch.tensor(1 / len(batch), dtype=like.dtype)
        else:
            comm.send(z.detach(), rank - 1)
            dz = receive(like, rank - 1)
        torch.autograd.backward(z, dz)
        if tip:
            dy = turned.grad
        else:
            comm.send(turned.grad, rank + 1)
            dy = receive(like, rank + 1)
        torch.autograd.backward(y, dy)
        if not first:
            comm.send(x.grad, rank - 1)
""",
        "gradients asked for one by one": [
            (
                "            (mse_loss(z, target) / len(batch)).backward()\n",
                "            (mse_loss(z, target) / len(batch)).backward(inputs=[turned, *far.parameters()])\n",
            ),
            (
                "            z.backward(receive(like, rank - 1))\n",
                "            z.backward(receive(like, rank - 1), inputs=[turned, *far.parameters()])\n",
            ),
        ],
    },
}
