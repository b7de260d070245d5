"""Typical wrong answers and lazy cheats of the exercises on PP basic."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "down_first, down_second, up_second, up_first"

TYPICAL = {
    "pp_basic-1": {
        "gradients in stage order": Bad(f"{NAMES} = 4, -4, 6, -6", "in the order in which they travel"),
        "target minus prediction": Bad(f"{NAMES} = 4, -4, 6, 6", "the wrong sign"),
        "gradient of the weight": Bad(f"{NAMES} = 4, -4, 8, 6", "second gradient: 8"),
        "a weight too many": Bad(f"{NAMES} = 4, -12, -6, 6", "second activation: -12"),
    },
    "pp_basic-2": {
        "not contiguous": Bad([("x.contiguous()", "x")], "contiguous"),
        "sizes in eight bits": Bad(
            [
                ("torch.zeros(8, dtype=torch.int64)", "torch.zeros(8, dtype=torch.uint8)"),
                (
                    "torch.tensor(x.shape, dtype=torch.int64)",
                    "torch.tensor([n % 256 for n in x.shape], dtype=torch.uint8)",
                ),
                ("torch.empty(8, dtype=torch.int64)", "torch.empty(8, dtype=torch.uint8)"),
            ],
            "a bool tensor of shape (70000,)",
        ),
        "sizes in sixteen bits": Bad(
            [
                ("torch.zeros(8, dtype=torch.int64)", "torch.zeros(8, dtype=torch.int16)"),
                ("torch.tensor(x.shape, dtype=torch.int64)", "torch.tensor([n % 2**15 for n in x.shape])"),
                ("torch.empty(8, dtype=torch.int64)", "torch.empty(8, dtype=torch.int16)"),
            ],
            "a bool tensor of shape (70000,)",
        ),
        "all by way of float64": Bad(
            [
                ("comm.send(x.contiguous(), dst)", "comm.send(x.to(torch.float64).contiguous(), dst)"),
                ("comm.recv(x, src)", "comm.recv(y := x.double(), src); x = y.to(x.dtype)"),
            ],
            "4864 bytes for 1200 bytes of data",
        ),
        "whole numbers by way of float64": Bad(
            [
                (
                    "comm.send(x.contiguous(), dst)",
                    "comm.send((x.double() if x.dtype == torch.int64 else x).contiguous(), dst)",
                ),
                (
                    "comm.recv(x, src)",
                    "y = x.double() if x.dtype == torch.int64 else x; comm.recv(y, src); x = y.to(x.dtype)",
                ),
            ],
            "element 0: 9007199254740992 instead of 9007199254740993",
        ),
        "all by way of float32": Bad(
            [
                ("comm.send(x.contiguous(), dst)", "comm.send(x.float().contiguous(), dst)"),
                ("comm.recv(x, src)", "comm.recv(y := x.float(), src); x = y.to(x.dtype)"),
            ],
            "a float64 tensor of shape (3, 4): rank 1 got another element",
        ),
        "a send nobody waits for": Bad(
            [("comm.send(x.contiguous(), dst)", "comm.isend(x.contiguous(), dst)")], "without a wait()"
        ),
        "always float64": Bad([("dtype=TYPES[dtype]", "dtype=torch.float64")], "float32 tensor of shape (5,)"),
        "three dimensions at most": Bad([("sizes[:num_dims]", "sizes[:min(num_dims, 3)]")], "(2, 2, 1, 2, 2)"),
        "a message per dimension": Bad(
            """
def send_tensor(x, dst):
    comm.send(torch.tensor([x.dim(), TYPES.index(x.dtype)]), dst)
    for size in x.shape:
        comm.send(torch.tensor([size]), dst)
    if x.numel():
        comm.send(x.contiguous(), dst)


def recv_tensor(src):
    comm.recv(start := torch.empty(2, dtype=torch.int64), src)
    sizes = []
    for _ in range(int(start[0])):
        comm.recv(size := torch.empty(1, dtype=torch.int64), src)
        sizes.append(int(size))
    x = torch.empty(sizes, dtype=TYPES[int(start[1])])
    if x.numel():
        comm.recv(x, src)
    return x
""",
            "4 messages; a header and the tensor are enough",
        ),
        "padded to a thousand elements": Bad(
            [
                (
                    "comm.send(x.contiguous(), dst)",
                    "comm.send(torch.cat([x.flatten(), x.new_zeros(1000 - x.numel())]), dst)",
                ),
                ("comm.recv(x, src)", "comm.recv(y := x.new_empty(1000), src); x = y[: x.numel()].reshape(x.shape)"),
            ],
            "bytes of data; the header may take 128",
        ),
    },
    "pp_basic-3": {
        "down only": Bad([("outbox.copy_(x.grad)", "pass")], "all zero"),
        "up only": Bad([("outbox.copy_(y.detach())", "pass")], "rank 1 worked on zeros"),
        "gradients put in place of the older ones": Bad(
            [
                (
                    "    outbox = torch.zeros_like(like)\n",
                    "    outbox = torch.zeros_like(like)\n    stage.zero_grad()\n",
                ),
            ],
            "the gradients of the step before are gone",
        ),
        "copies too late": Bad(
            [
                (
                    "outbox.copy_(y.detach())\n        comm.send(outbox, rank + 1)",
                    "comm.send(outbox, rank + 1)\n        outbox.copy_(y.detach())",
                )
            ],
            "rank 1 worked on zeros",
        ),
        "sends the output's gradient": Bad([("outbox.copy_(x.grad)", "outbox.copy_(y.detach())")], "differ"),
    },
}

CHEATS = {
    "pp_basic-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "pp_basic-2": {
        "pickles": Bad(
            """
def send_tensor(x, dst):
    import torch.distributed as dist
    dist.send_object_list([x], dst)


def recv_tensor(src):
    import torch.distributed as dist
    found = [None]
    dist.recv_object_list(found, src)
    return found[0]
""",
            "no message went through",
        ),
        "gathers": Bad(
            """
def send_tensor(x, dst):
    comm.all_gather_object(x)


def recv_tensor(src):
    return torch.zeros(3, 4)
""",
            "rank 1",
        ),
    },
    "pp_basic-3": {
        "does nothing": Bad("def pipeline_step(*args):\n    pass", "all zero"),
        "makes gradients up": Bad(
            "def pipeline_step(rank, world_size, stage, *rest):\n"
            "    for p in stage.parameters():\n        p.grad = torch.ones_like(p)",
            "differ",
        ),
    },
}
