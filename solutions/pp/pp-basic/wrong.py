"""Typical wrong answers and lazy cheats of the exercises on PP basic."""

from bad_answer import Bad

TYPICAL = {
    "pp_basic-4": {
        "arrives in another tensor": Bad(
            [
                (
                    "        irecv(x, src, tag).wait()\n    return x",
                    "        irecv(torch.empty_like(x), src, tag).wait()\n    return torch.zeros_like(x)",
                )
            ],
            "has the message arrived in another tensor than the one that is returned?",
        ),
        "waits until it has arrived": Bad(
            [("    return works", "    for work in works:\n        work.wait()\n    return works")],
            "each waits for the next",
        ),
        "a send that nobody waits for": Bad([("    return works", "    return works[:1]")], "without a wait()"),
        "without tags": Bad(
            [(", dst, tag)", ", dst)"), (", src, tag)", ", src)")], "the second one first: rank 1: got"
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
    "pp_basic-4": {
        "pickles": Bad(
            """
import torch.distributed as dist


def send_tensor(x, dst, tag):
    dist.send_object_list([x], dst)
    return []


def recv_tensor(src, tag):
    found = [None]
    dist.recv_object_list(found, src)
    return found[0]
""",
            "torch.distributed is off in every part",
        ),
    },
    "pp_basic-3": {
        "does nothing": Bad("def pipeline_step(*args):\n    pass", "all zero"),
    },
}
