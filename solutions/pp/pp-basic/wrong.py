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
        "a send nobody waits for": Bad(
            [("comm.send(x.contiguous(), dst)", "comm.isend(x.contiguous(), dst)")], "without a wait()"
        ),
        "always float64": Bad([("dtype=TYPES[dtype]", "dtype=torch.float64")], "float32 tensor of shape (5,)"),
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
    },
    "pp_basic-3": {
        "does nothing": Bad("def pipeline_step(*args):\n    pass", "all zero"),
    },
}
