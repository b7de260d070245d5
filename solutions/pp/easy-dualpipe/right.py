"""Right answers of another style to the exercises on Easy-DualPipe."""

RIGHT = {
    "easy_dualpipe-2": {
        "step by step": """
def slot(num_ranks, num_microbatches, stage, kind, microbatch):
    p, half = num_ranks, num_microbatches // 2
    i = microbatch - half if microbatch >= half else microbatch
    t = 2 * i
    while i >= p // 2:
        i -= p // 2
        t += p
    if kind == "B":
        return t + p + (p - 1 - stage)
    return t + stage
""",
        "a list of entries": """
def slot(num_ranks, num_microbatches, stage, kind, microbatch):
    half, per_group = num_microbatches // 2, num_ranks // 2
    entries = [2 * num_ranks * (i // per_group) + 2 * (i % per_group) for i in range(half)] * 2
    turn = 2 * (num_ranks - stage) - 1 if kind == "B" else 0
    return entries[microbatch] + stage + turn
""",
    },
    "easy_dualpipe-4": {
        "gathers from the mirror": [
            (
                "            comm.all_reduce(parameter.grad, group=group)",
                "            both = [torch.empty_like(parameter.grad) for _ in range(2)]\n"
                "            comm.all_gather(both, parameter.grad, group=group)\n"
                "            parameter.grad = both[0] + both[1]",
            )
        ],
        "messages between mirrors": """
def sum_copies(rank, world_size, stages):
    mirror = world_size - 1 - rank
    for stage in sorted(stages):
        for parameter in stages[stage].parameters():
            theirs = torch.empty_like(parameter.grad)
            work = comm.isend(parameter.grad.clone(), mirror)
            comm.recv(theirs, mirror)
            work.wait()
            parameter.grad += theirs
""",
    },
}
