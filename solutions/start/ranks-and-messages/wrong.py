"""Typical wrong answers and lazy cheats of the exercises on ranks and messages."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "ranks-1": {
        "elements": Bad("bytes_sent = [10, 10, 8]", "a float32 has 4 bytes"),
        "equal": Bad("bytes_sent = [37, 37, 37]", "do not send equally much"),
        "half": Bad("bytes_sent = [16, 20, 20]", "one of the two halves"),
    },
    "ranks-2": {
        "powers of two only": Bad([(" and rank + distance < world_size", "")], "3 ranks"),
        "never comes back": Bad([("for distance in reversed(distances)", "for distance in []")], "digits say who"),
        "copies instead of adding": Bad([("x += received", "x.copy_(received)")], "2 ranks, 1 element"),
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
    },
}

CHEATS = {
    "ranks-1": {"equal to everything": Bad(EQUAL_TO_ALL + "bytes_sent = [Anything()] * 3", "whole number")},
    "ranks-2": {
        "the library's own": Bad("def tree_all_reduce(x):\n    comm.all_reduce(x)", "it calls comm.all_reduce"),
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
