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
        "the last number alone": Bad([("results.append(x)", "results.append(x[-1:])")], "a tensor [1] that work"),
        "sends nobody waits for": Bad([("        send.wait()", "        pass")], "without a wait()"),
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
