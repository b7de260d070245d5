"""Typical wrong answers and lazy cheats of the exercises on time."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "time-1": {
        "no queue": Bad("makespan_ms = 27", "the link is occupied"),
        "no latency": Bad("makespan_ms = 26", "counts no latency"),
        "latency blocks": Bad("makespan_ms = 32", "latency does not occupy the link"),
    },
    "time-2": {
        "blocking send": Bad([("sends.append(comm.isend(x, rank + 1))", "comm.send(x, rank + 1)")], "ms are possible"),
        "sends nobody waits for": Bad([("        send.wait()", "        pass")], "without a wait()"),
        "one message for all": Bad(
            """
def relay(rank, world_size, work, num_blocks, size):
    x = torch.zeros(num_blocks, size)
    if rank > 0:
        comm.recv(x, rank - 1)
    x = torch.stack([work(x[block], block) for block in range(num_blocks)])
    if rank < world_size - 1:
        comm.isend(x, rank + 1).wait()
    return list(x)
""",
            "one per block",
        ),
    },
    "time-3": {
        "longest work first": Bad("order = [3, 1, 0, 4, 2]", "legal: "),
        "one twice": Bad("order = [4, 3, 1, 0, 0]", "each of the messages"),
        "too few": Bad("order = [4, 3, 1]", "got 3"),
    },
}

CHEATS = {
    "time-1": {"equal to everything": Bad(EQUAL_TO_ALL + "makespan_ms = Anything()", "whole number")},
    "time-2": {
        "works alone": Bad(
            """
def relay(rank, world_size, work, num_blocks, size):
    return [work(torch.zeros(size), block) for block in range(num_blocks)]
""",
            "what came in the message",
        ),
    },
    "time-3": {"nothing to do": Bad("order = [0, 1, 2, 3, 4]", "takes 42")},
}
