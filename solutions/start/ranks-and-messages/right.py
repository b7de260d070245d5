"""Right answers of another style to the exercises on ranks and messages."""

RIGHT = {
    "ranks-2": {
        "a heap's tree": """
def tree_all_reduce(x):
    rank, size = comm.get_rank(), comm.get_world_size()
    parts = [torch.empty_like(x) for _ in range(size.bit_length())]
    children = [rank + (1 << k) for k in range(size.bit_length()) if rank < 1 << k and rank + (1 << k) < size]
    for child, part in reversed(list(zip(children, parts))):
        comm.recv(part, child)
        x.add_(part)
    if rank:
        parent = rank - (1 << (rank.bit_length() - 1))
        comm.send(x, parent)
        comm.recv(x, parent)
    for child in children:
        comm.send(x, child)
""",
        "its root is the last rank": [
            (
                "rank, world_size = comm.get_rank(), comm.get_world_size()\n    distances",
                "size = comm.get_world_size()\n    rank, world_size = size - 1 - comm.get_rank(), size\n    distances",
            ),
            ("comm.send(x, rank - distance)", "comm.send(x, size - 1 - rank + distance)"),
            ("comm.recv(received, rank + distance)", "comm.recv(received, size - 1 - rank - distance)"),
            ("comm.recv(x, rank - distance)", "comm.recv(x, size - 1 - rank + distance)"),
            ("comm.send(x, rank + distance)", "comm.send(x, size - 1 - rank - distance)"),
        ],
    },
    "ranks-3": {
        "even ranks first": [
            (
                "works = [comm.irecv(from_left, left), comm.irecv(from_right, right)]\n"
                "    works += [comm.isend(x[-1:].contiguous(), right), comm.isend(x[:1].contiguous(), left)]\n"
                "    for work in works:\n        work.wait()",
                "if rank % 2 == 0:\n"
                "        comm.send(x[-1:].clone(), right)\n        comm.recv(from_left, left)\n"
                "        comm.send(x[:1].clone(), left)\n        comm.recv(from_right, right)\n"
                "    else:\n"
                "        comm.recv(from_left, left)\n        comm.send(x[-1:].clone(), right)\n"
                "        comm.recv(from_right, right)\n        comm.send(x[:1].clone(), left)",
            )
        ],
        "a tag for each direction": [
            (
                "works = [comm.irecv(from_left, left), comm.irecv(from_right, right)]\n"
                "    works += [comm.isend(x[-1:].contiguous(), right), comm.isend(x[:1].contiguous(), left)]\n",
                "works = [comm.isend(x[:1].clone(), left, tag=1), comm.isend(x[-1:].clone(), right, tag=2)]\n"
                "    works += [comm.irecv(from_right, right, tag=1), comm.irecv(from_left, left, tag=2)]\n",
            )
        ],
    },
}
