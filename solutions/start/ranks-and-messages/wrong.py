"""Typical wrong answers and lazy cheats of the exercises on ranks and messages."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "ranks-1": {
        "elements": Bad("bytes_sent = [10, 10, 8]", "a float32 has 4 bytes"),
        "equal": Bad("bytes_sent = [37, 37, 37]", "do not send equally much"),
        "equal, exactly": Bad("bytes_sent = [37.33, 37.33, 37.33]", "do not send equally much"),
        "half": Bad("bytes_sent = [16, 20, 20]", "one of the two halves"),
        "turned": Bad("bytes_sent = [32, 40, 40]", "its distribution is not"),
        "a fraction": Bad("bytes_sent = [40.5, 40, 32]", "whole number"),
    },
    "ranks-2": {
        "powers of two only": Bad([(" and rank + distance < world_size", "")], "3 ranks"),
        "never comes back": Bad([("for distance in reversed(distances)", "for distance in []")], "digits say who"),
        "copies instead of adding": Bad([("x += received", "x.copy_(received)")], "2 ranks, 1 element"),
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
        "recursive doubling": Bad(
            """
def tree_all_reduce(x):
    rank, world_size, distance = comm.get_rank(), comm.get_world_size(), 1
    while distance < world_size:
        received, peer = torch.empty_like(x), rank ^ distance
        if peer < world_size:
            works = [comm.irecv(received, peer), comm.isend(x.clone(), peer)]
            for work in works:
                work.wait()
            x += received
        distance *= 2
""",
            "3 ranks",
        ),
        "twice the bytes": Bad(
            [
                ("comm.send(x, rank - distance)", "comm.send(torch.stack([x, x]), rank - distance)"),
                (
                    "comm.recv(received, rank + distance)",
                    "comm.recv(both := torch.stack([x, x]), rank + distance); received = both[0]",
                ),
            ],
            "bytes were sent",
        ),
        "a table of everybody's": Bad(
            """
def tree_all_reduce(x):
    rank, world_size = comm.get_rank(), comm.get_world_size()
    table = torch.zeros(world_size, *x.shape, dtype=x.dtype)
    table[rank] = x
    distances = [1 << k for k in range((world_size - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            comm.send(table, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            comm.recv(theirs := torch.empty_like(table), rank + distance)
            table += theirs
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            comm.recv(table, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            comm.send(table, rank + distance)
    x.copy_(table.sum(0))
""",
            "bytes were sent",
        ),
        "vectors only": Bad(
            [("received = torch.empty_like(x)", "received = torch.empty(x.numel(), dtype=x.dtype)")], "2 x 3 elements"
        ),
        "a send nobody waits for": Bad(
            [("comm.send(x, rank + distance)", "comm.isend(x, rank + distance)")], "without a wait()"
        ),
        "returns the sum": Bad(
            [("received = torch.empty_like(x)", "received = torch.empty_like(x); x = x.clone()")],
            "belongs into x itself",
        ),
    },
    "ranks-3": {
        "four elements": Bad([("x[-1:].contiguous()", "x[3][None].contiguous()")], "IndexError"),
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
        "sends everything": Bad(
            [
                (
                    "from_left, from_right = torch.empty_like(x[:1]), torch.empty_like(x[:1])",
                    "from_left, from_right = torch.empty_like(x), torch.empty_like(x)",
                ),
                ("x[-1:].contiguous()", "x"),
                ("x[:1].contiguous()", "x"),
                ("return from_left, from_right", "return from_left[-1:], from_right[:1]"),
            ],
            "bytes; two elements",
        ),
    },
}

CHEATS = {
    "ranks-1": {"equal to everything": Bad(EQUAL_TO_ALL + "bytes_sent = [Anything()] * 3", "whole number")},
    "ranks-2": {
        "the library's own": Bad("def tree_all_reduce(x):\n    comm.all_reduce(x)", "it calls comm.all_reduce"),
        "past the ledger": Bad(
            "import torch.distributed as dist\ndef tree_all_reduce(x):\n    dist.all_reduce(x)",
            "no message went through",
        ),
        "does nothing": Bad("def tree_all_reduce(x):\n    pass", "what it began with"),
        "knows the answer": Bad("def tree_all_reduce(x):\n    x.copy_(x)\n    x.fill_(11)", "expected"),
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
        "returns its own": Bad("def exchange(x):\n    return x[-1:], x[:1]", "expected"),
    },
}
