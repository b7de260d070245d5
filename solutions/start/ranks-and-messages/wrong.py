"""Typical wrong answers and lazy cheats of the exercises on ranks and messages."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "ranks-1": {
        "elements": Bad("bytes_sent = [10, 10, 8]", "a float32 has 4 bytes"),
        "equal": Bad("bytes_sent = [37, 37, 37]", "do not send equally much"),
        "half": Bad("bytes_sent = [16, 20, 20]", "one of the two halves"),
    },
    "ranks-2": {
        "never comes back": Bad([("for distance in reversed(distances)", "for distance in []")], "digits say who"),
        "a star": Bad(
            [
                ("[1 << k for k in range((world_size - 1).bit_length())]", "list(range(1, world_size))"),
                ("if rank % (2 * distance) == distance:", "if rank == distance:"),
                ("rank % (2 * distance) == 0 and rank + distance < world_size", "rank == 0"),
                ("rank - distance", "0"),
                ("rank + distance", "distance"),
            ],
            "not one rank from all",
        ),
        "a chain": Bad(
            """
def tree_all_reduce(x):
    rank, world_size, received = comm.get_rank(), comm.get_world_size(), torch.empty_like(x)
    if rank < world_size - 1:
        comm.recv(received, rank + 1)
        x += received
    if rank > 0:
        comm.send(x, rank - 1)
        comm.recv(x, rank - 1)
    if rank < world_size - 1:
        comm.send(x, rank + 1)
""",
            "messages waited for one another",
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
    "ranks-1": {"equal to everything": Bad(EQUAL_TO_ALL + "bytes_sent = [Anything()] * 3", "whole number")},
    "ranks-2": {
        "past the ledger": Bad(
            "import torch.distributed as dist\ndef tree_all_reduce(x):\n    dist.all_reduce(x)",
            "no message went through",
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
