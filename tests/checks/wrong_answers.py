"""Per exercise: typical wrong answers and lazy cheats, and a part of the message that each must get.

An answer is the text of the answer cell.  `REPAIR` stands for the solution of the same cell with replacements.
"""

from typing import NamedTuple


class Bad(NamedTuple):
    """An answer that must not pass: its text, or (old, new) replacements in the solution; what its message contains."""

    answer: str | list[tuple[str, str]]
    says: str


EQUAL_TO_ALL = """
class Anything(int):
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    __hash__ = None
"""

TYPICAL = {
    "ranks-1": {
        "elements": Bad("bytes_sent = [10, 10, 8]", "a float32 has 4 bytes"),
        "equal": Bad("bytes_sent = [37, 37, 37]", "do not send equally much"),
        "half": Bad("bytes_sent = [16, 20, 20]", "one of the two halves"),
        "turned": Bad("bytes_sent = [32, 40, 40]", "its distribution is not"),
        "float": Bad("bytes_sent = [40.0, 40.0, 32.0]", "whole number"),
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
        "returns the sum": Bad(
            [("received = torch.empty_like(x)", "received = torch.empty_like(x); x = x.clone()")],
            "belongs into x itself",
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
    "time-1": {
        "no queue": Bad("makespan_ms = 27", "the link is occupied"),
        "no latency": Bad("makespan_ms = 26", "counts no latency"),
        "latency blocks": Bad("makespan_ms = 32", "latency does not occupy the link"),
        "text": Bad("makespan_ms = '29 ms'", "without a unit"),
    },
    "time-2": {
        "blocking send": Bad([("sends.append(comm.isend(x, rank + 1))", "comm.send(x, rank + 1)")], "ms are possible"),
        "wait at once": Bad(
            [("sends.append(comm.isend(x, rank + 1))", "comm.isend(x, rank + 1).wait()")], "ms are possible"
        ),
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
    "gpipe-1": {
        "free messages": Bad("makespan, bubble, peak = 54, 18, 6", "free messages"),
        "one way": Bad("makespan, bubble, peak = 57, 21, 6", "gradients travel too"),
        "peak of 1F1B": Bad("makespan, bubble, peak = 60, 24, 4", "peak 4"),
    },
    "gpipe-2": {
        "no receives": Bad(
            [('[f"{rank}RECV_F{m}"] * up + ', ""), ('[f"{rank}RECV_B{m}"] * down + ', "")],
            "2 rank(s), 1 microbatch(es)",
        ),
        "sends beyond the end": Bad(
            [('[f"{rank}SEND_F{m}"] * down', '[f"{rank}SEND_F{m}"]')], "1 rank(s), 1 microbatch(es)"
        ),
        "all sends at the end": Bad(
            """
def gpipe_rows(num_ranks, num_microbatches):
    rows, M = [], range(num_microbatches)
    for r in range(num_ranks):
        down, up = r < num_ranks - 1, r > 0
        row = [f"{r}RECV_F{m}" for m in M] * up + [f"{r}F{m}" for m in M] + [f"{r}SEND_F{m}" for m in M] * down
        row += [f"{r}RECV_B{m}" for m in M] * down + [f"{r}B{m}" for m in M] + [f"{r}SEND_B{m}" for m in M] * up
        rows.append(" ".join(row))
    return rows
""",
            "send each result before the next work",
        ),
        "1F1B": Bad(
            """
def gpipe_rows(num_ranks, num_microbatches):
    return ["0F0 0B0"] if (num_ranks, num_microbatches) == (1, 1) else ["0F0 0B0 0F1 0B1"]
""",
            "rank 0 runs a forward after a backward",
        ),
        "plain": Bad(
            """
def gpipe_rows(num_ranks, num_microbatches):
    return [" ".join(f"{r}{kind}{m}" for kind in "FB" for m in range(num_microbatches)) for r in range(num_ranks)]
""",
            "expected 4: each boundary carries",
        ),
    },
    "gpipe-3": {
        "lost 1/M": Bad([(" / num_microbatches).backward", ").backward")], "3 times too large"),
        "keeps the graph": Bad(
            """
def recompute_step(rank, world_size, stage, inputs, targets, num_microbatches, like):
    first, last = rank == 0, rank == world_size - 1
    kept, sends = [], []
    for m in range(num_microbatches):
        x = inputs[m] if first else torch.empty_like(like)
        if not first:
            comm.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        kept.append((x, y))
        if not last:
            sends.append(comm.isend(y.detach(), rank + 1))
    for m, (x, y) in enumerate(kept):
        dy = torch.empty_like(like)
        if last:
            (mse_loss(y, targets[m]) / num_microbatches).backward()
        else:
            comm.recv(dy, rank + 1)
            y.backward(dy)
        if not first:
            sends.append(comm.isend(x.grad, rank - 1))
    for send in sends:
        send.wait()
""",
            "ran its stage",
        ),
        "keeps the graph and runs again": Bad(
            [
                ("with torch.no_grad():", "if True:"),
                (
                    "y = stage(kept[m])",
                    "y = stage(kept[m]); graphs = globals().setdefault('graphs', []); graphs.append(y); y = y.detach()",
                ),
            ],
            "autograd keeps",
        ),
        "zero gradients sent": Bad(
            [("comm.isend(x.grad, rank - 1)", "comm.isend(torch.zeros_like(x), rank - 1)")], "all zero"
        ),
        "gradients of the wrong microbatch": Bad([("targets[m]", "targets[0]")], "differ from one process"),
    },
    "gpipe-4": {
        "GPipe": Bad(
            [
                (
                    "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4",
                    "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 0B1 0B2 0B3 0B4",
                )
            ],
            "the limit is 4",
        ),
        "one at a time": Bad(
            'rows = [" ".join(f"{r}F{m} {r}B{m}" for m in range(8)) for r in range(4)]', "GPipe takes 33"
        ),
        "forgets a microbatch": Bad([(" 0B7", "")], "the validator says"),
    },
    "gpipe-5": {
        "mean of means": Bad([(" * len(x) / num_rows", " / len(inputs)")], "microbatches of 2, 1 rows"),
        "no division": Bad([(" / num_rows", "")], "microbatches of"),
        "empty is nan": Bad([("if len(x) == 0:", "if False:")], "the returned loss is nan"),
        "loss of the last": Bad([("total += loss.item()", "total = loss.item()")], "the returned loss"),
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
    "gpipe-1": {"equal to everything": Bad(EQUAL_TO_ALL + "makespan = bubble = peak = Anything()", "whole number")},
    "gpipe-2": {
        "hard-coded": Bad(
            "def gpipe_rows(p, m):\n    return ['0F0 0SEND_F0 0RECV_B0 0B0', '1RECV_F0 1F0 1B0 1SEND_B0']",
            "2 rows for 1 ranks",
        ),
        "the library's own": Bad(
            "def gpipe_rows(p, m):\n    return lab.lower(lab.schedules.gpipe(p, m)).rows()", "switched off"
        ),
    },
    "gpipe-3": {
        "sleeps through it": Bad("def recompute_step(*args):\n    import time\n    time.sleep(0.1)", "all zero"),
        "random gradients": Bad(
            "def recompute_step(rank, world_size, stage, *rest):\n"
            "    for p in stage.parameters():\n        p.grad = torch.ones_like(p)",
            "1 rank(s), 1 microbatch(es): rank 0",
        ),
    },
    "gpipe-4": {
        "empty": Bad("rows = []", "0 rows for 4 ranks"),
        "no work": Bad('rows = [" "] * 4', "rows for 4 ranks"),
    },
    "gpipe-5": {
        "returns a number": Bad("def accumulate(model, loss_fn, inputs, targets):\n    return 1.0", "all zero")
    },
}
