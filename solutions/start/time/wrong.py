"""Typical wrong answers and lazy cheats of the exercises on time."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "time-1": {
        "no queue": Bad("makespan_ms = 27", "the link is occupied"),
        "no latency": Bad("makespan_ms = 26", "counts no latency"),
        "latency blocks": Bad("makespan_ms = 32", "latency does not occupy the link"),
        "text": Bad("makespan_ms = '29 ms'", "without a unit"),
    },
    "time-2": {
        "blocking send": Bad([("sends.append(comm.isend(x, rank + 1))", "comm.send(x, rank + 1)")], "ms are possible"),
        "the last number alone": Bad([("results.append(x)", "results.append(x[-1:])")], "a tensor [1] that work"),
        "wait at once": Bad(
            [("sends.append(comm.isend(x, rank + 1))", "comm.isend(x, rank + 1).wait()")], "ms are possible"
        ),
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
        "never receives": Bad([("comm.recv(x, rank - 1)", "pass")], "rank 1: returned"),
        "receives and forgets": Bad(
            [("comm.recv(x, rank - 1)", "comm.recv(x.clone(), rank - 1)")], "what came in the message"
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
        "sleeps through it": Bad(
            "import time\ndef relay(rank, world_size, work, num_blocks, size):\n    time.sleep(0.2)\n    return []",
            "worked on blocks []",
        ),
    },
    "time-3": {"nothing to do": Bad("order = [0, 1, 2, 3, 4]", "takes 42"), "empty": Bad("order = []", "got 0")},
}
