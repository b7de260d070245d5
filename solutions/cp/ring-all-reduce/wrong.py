"""Typical wrong answers and lazy cheats of the exercises on the ring all-reduce."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "bytes_sent, messages = "
_RING = """
def {name}(x):
    rank, N = comm.get_rank(), comm.get_world_size()
    chunks = x.tensor_split(N)
    for i in range(2 * (N - 1)):
        target = chunks[(rank - i - 1) % N]
        arriving = torch.empty_like(target)
        swap(chunks[(rank - i) % N], arriving, (rank + 1) % N, (rank - 1) % N)
        target.copy_(arriving + target if i < N - 1 else arriving)
"""

TYPICAL = {
    "ring_all_reduce-1": {
        "formula for equal chunks": Bad(_PREDICT + "[60, 60, 60, 60], 24", "exact only for equal chunks"),
        "numbers": Bad(_PREDICT + "[7, 9, 8, 6], 18", "one has 8 bytes"),
        "empty chunks travel": Bad(_PREDICT + "[56, 72, 64, 48], 24", "does not travel"),
    },
    "ring_all_reduce-2": {
        "a ring": Bad(_RING.format(name="halving_doubling"), "6 messages waited for one another, 4 are enough"),
        "whole tensors": Bad(
            """
def halving_doubling(x):
    distance = comm.get_world_size() // 2
    while distance:
        arriving = torch.empty_like(x)
        swap(x, arriving, comm.get_rank() ^ distance, comm.get_rank() ^ distance)
        x += arriving
        distance //= 2
""",
            "each round swaps half",
        ),
        "no way back": Bad([("reversed(rounds)", "[]")], "is missing"),
    },
}

CHEATS = {
    "ring_all_reduce-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "bytes_sent, messages = [Anything()] * 4, Anything()", "must be a whole number"
        ),
    },
    "ring_all_reduce-2": {
        "knows the digits": Bad("def halving_doubling(x):\n    x[:] = int('1' * comm.get_world_size())", "no message"),
    },
}
