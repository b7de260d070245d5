"""Typical wrong answers and lazy cheats of the exercises on PP basic."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "down_first, down_second, up_second, up_first"

TYPICAL = {
    "pp_basic-1": {
        "gradients in stage order": Bad(f"{NAMES} = 4, -4, 6, -6", "in the order in which they travel"),
        "target minus prediction": Bad(f"{NAMES} = 4, -4, 6, 6", "minus the target"),
        "gradient of the weight": Bad(f"{NAMES} = 4, -4, 8, 6", "times the weight, with its sign"),
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
        "all by way of float64": Bad(
            [
                ("comm.send(x.contiguous(), dst)", "comm.send(x.to(torch.float64).contiguous(), dst)"),
                ("comm.recv(x, src)", "comm.recv(y := x.double(), src); x = y.to(x.dtype)"),
            ],
            "4864 bytes for 1200 bytes of data",
        ),
    },
    "pp_basic-3": {
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
        "sends the output's gradient": Bad([("outbox.copy_(x.grad)", "outbox.copy_(y.detach())")], "differ"),
    },
}

CHEATS = {
    "pp_basic-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "pp_basic-2": {
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
    },
}
