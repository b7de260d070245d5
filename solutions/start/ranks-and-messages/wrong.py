"""Typical wrong answers and lazy cheats of the exercises on ranks and messages."""

from bad_answer import Bad

TYPICAL = {
    "ranks-4": {
        "a block too early": Bad(
            [("blocks[(me - step - 1) % num] +", "blocks[(me - step) % num] +")], "(me - s - 1) mod N"
        ),
        "sums a copy": Bad(
            [("x.copy_(whole[: x.numel()].view_as(x))", "x.flatten().copy_(whole[: x.numel()])")],
            "the sum went into a copy",
        ),
        "everything to everybody": Bad(
            [
                (
                    "whole = all_gather(reduce_scatter(padded(x, len(ranks)), ranks), ranks)",
                    "whole = all_gather(padded(x, len(ranks))[None], ranks).sum(0)",
                )
            ],
            "2 (N - 1) blocks of the padded tensor",
        ),
        "into x": Bad(
            [
                ("blocks[(me - 1) % num].clone()", "blocks[(me - 1) % num]"),
                (
                    "total = blocks[(me - step - 1) % num] + pass_on(total, total, ranks)",
                    "total = blocks[(me - step - 1) % num].add_(pass_on(total, total, ranks))",
                ),
            ],
            "a part of x itself",
        ),
    },
    "ranks-3": {
        "receives first": Bad(
            """
def exchange(x):
    rank, world_size = comm.get_rank(), comm.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    from_left, from_right = torch.empty_like(x[:1]), torch.empty_like(x[:1])
    comm.recv(from_left, left)
    comm.recv(from_right, right)
    comm.send(x[-1:].contiguous(), right)
    comm.send(x[:1].contiguous(), left)
    return from_left, from_right
""",
            "2 ranks: no progress",
        ),
        "right receive first": Bad(
            [
                (
                    "comm.irecv(from_left, left), comm.irecv(from_right, right)",
                    "comm.irecv(from_right, right), comm.irecv(from_left, left)",
                )
            ],
            "in the order in which it sent them",
        ),
        "sends nobody waits for": Bad([("for work in works:", "for work in works[:2]:")], "without a wait()"),
    },
}

CHEATS = {
    "ranks-4": {
        "torch's own": Bad(
            [
                ("import torch\n", "import torch\nimport torch.distributed as dist\n"),
                ("    with torch.no_grad():", "    dist.all_reduce(x)\n    with torch.no_grad():"),
            ],
            "torch.distributed is off in every part",
        ),
        "a collective": Bad(
            [("get_rank, irecv, isend", "all_reduce as summed, get_rank, irecv, isend")],
            "dualpipe_lab.comm.all_reduce is the library's",
        ),
    },
    "ranks-3": {
        "gathers everything": Bad(
            """
def exchange(x):
    rank, world_size = comm.get_rank(), comm.get_world_size()
    parts = [torch.empty_like(x) for _ in range(world_size)]
    comm.all_gather(parts, x)
    return parts[(rank - 1) % world_size][-1:], parts[(rank + 1) % world_size][:1]
""",
            "it calls comm.all_gather",
        ),
    },
}
