"""Typical wrong answers and lazy cheats of the exercises on Easy-DualPipe."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "bubble, makespan, peak_of_rank_0, peak_of_rank_2"
STEP = "def two_way_step(rank, world_size, first, last, inputs, targets, num_microbatches, like):\n"

TYPICAL = {
    "easy_dualpipe-1": {
        "as many as ranks": Bad(f"{NAMES} = 12, 32, 3, 4", "for m = p"),
        "1F1B": Bad(f"{NAMES} = 25, 45, 6, 4", "1F1B's"),
        "longer gaps": Bad(f"{NAMES} = 18, 38, 3, 4", "the shorter of F and B"),
        "one direction": Bad(f"{NAMES} = 16, 36, 2, 4", "of direction 1, stage 5"),
        "full": Bad(f"{NAMES} = 16, 36, 3, 6", "peak of rank 2, 6"),
    },
    "easy_dualpipe-2": {
        "enter one apart": Bad([("2 * place", "place")], "4 ranks, 4 microbatches: rank 2 has both"),
        "no groups": Bad(
            [("2 * num_ranks * group + 2 * place", "2 * (microbatch % (num_microbatches // 2))")], "has both"
        ),
        "groups too far apart": Bad([("2 * num_ranks * group", "3 * num_ranks * group")], "one group of p follows"),
        "the directions in turn": Bad(
            [("return ", "return (microbatch >= num_microbatches // 2) * 6 * num_ranks * num_microbatches + ")],
            "2 ranks, 2 microbatches: the last slot is",
        ),
        "forwards upwards": Bad([("way = stage if", "way = num_ranks - 1 - stage if")], "its input is made by"),
        "the chapter's loop": Bad(
            """
def slot(num_ranks, num_microbatches, stage, kind, microbatch):
    last, half, t = num_ranks - 1, num_microbatches // 2, 0
    ready = {(0, "F", i) for i in range(num_microbatches)}
    while True:
        taken = {}
        for s, k, i in sorted(ready, key=lambda action: (action[1] == "F", action[2] % half, -action[0])):
            taken.setdefault(s if i < half else last - s, (s, k, i))
        if (stage, kind, microbatch) in taken.values():
            return t
        ready -= set(taken.values())
        for s, k, i in taken.values():
            if k == "F":
                ready.add((s + 1, "F", i) if s < last else (s, "B", i))
            elif s > 0:
                ready.add((s - 1, "B", i))
        t += 1
""",
            "512 ranks, 100000 microbatches",
        ),
        "half slots": Bad([("return ", "return 0.5 * ")], "expected int from 0"),
    },
    "easy_dualpipe-3": {
        "not summed": Bad([("comm.all_reduce(parameter.grad)", "pass")], "direction 0 alone"),
        "averaged": Bad(
            [("comm.all_reduce(parameter.grad)", "comm.all_reduce(parameter.grad.div_(2))")], "not averaged"
        ),
        "the last one wins": Bad(
            [
                ("loss.backward()", "last.zero_grad(); loss.backward()"),
                ("y.backward", "dy = swap(theirs.grad); first.zero_grad(); y.backward"),
                ("(swap(theirs.grad))", "(dy)"),
            ],
            "microbatches 1 and 3 alone",
        ),
        "plain data parallelism": Bad(
            STEP
            + """
    other = 1 - rank
    for x, t in zip(inputs, targets):
        mine = torch.empty_like(t)
        sending = comm.isend(t, other)
        comm.recv(mine, other)
        sending.wait()
        (mse_loss(last(first(x)), mine) / num_microbatches).backward()
    for p in [*first.parameters(), *last.parameters()]:
        comm.all_reduce(p.grad)
""",
            "`last` did not work on what `first` of the other rank made of its inputs",
        ),
        "plain data parallelism of the other's data": Bad(
            STEP
            + """
    other = 1 - rank
    for x, t in zip(inputs, targets):
        theirs = torch.empty_like(x)
        sending = comm.isend(x, other)
        comm.recv(theirs, other)
        sending.wait()
        (mse_loss(last(first(theirs)), t) / num_microbatches).backward()
    for p in [*first.parameters(), *last.parameters()]:
        comm.all_reduce(p.grad)
""",
            "`first` did not work on this rank's own inputs",
        ),
        "a send nobody waits for": Bad([("        sending.wait()\n", "")], "without a wait()"),
        "mean over one direction": Bad([("/ num_microbatches", "/ len(inputs)")], "twice that of one process"),
        "summed over stages": Bad(
            [("in (first, last)", "in ((first, last) if rank == 0 else (last, first))")], "one order"
        ),
        "both receive first": Bad(
            [
                ("        sending = comm.isend(x, 1 - rank)\n", ""),
                ("        sending.wait()\n", "        comm.send(x, 1 - rank)\n"),
            ],
            "2 ranks, 2 microbatches",
        ),
        "one direction after the other": Bad(
            STEP
            + """
    other, loads = 1 - rank, range(len(inputs))
    for entry in (0, 1):
        for i in loads:
            if rank == entry:
                y = first(inputs[i])
                comm.send(y.detach(), other)
                dy = torch.empty_like(like)
                comm.recv(dy, other)
                y.backward(dy)
            else:
                x = torch.empty_like(like)
                comm.recv(x, other)
                (mse_loss(last(x.requires_grad_()), targets[i]) / num_microbatches).backward()
                comm.send(x.grad, other)
    for stage in (first, last):
        for parameter in stage.parameters():
            comm.all_reduce(parameter.grad)
""",
            "its work takes 6",
        ),
        "all forwards first": Bad(
            [
                (
                    "    for x, target in zip(inputs, targets):\n        y = first(x)",
                    "    ys = [first(x) for x in inputs]\n    for y, target in zip(ys, targets):",
                ),
            ],
            "two microbatches need",
        ),
    },
    "easy_dualpipe-4": {
        "order only": Bad(
            [("comm.all_reduce(parameter.grad, group=group)", "comm.all_reduce(parameter.grad.div_(2), group=group)")],
            "not averaged",
        ),
        "sum only": Bad([("in sorted(stages)", "in stages")], "must take their stages in one order"),
        "nothing": Bad("def sum_copies(rank, world_size, stages):\n    pass", "direction 0 alone"),
        "all ranks": Bad([(", group=group", "")], "the sum over several stages"),
    },
}

CHEATS = {
    "easy_dualpipe-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "easy_dualpipe-2": {
        "hard-coded": Bad(
            "def slot(p, m, stage, kind, i):\n"
            "    return {(0, 'F'): 0, (1, 'F'): 1, (1, 'B'): 2, (0, 'B'): 3}[stage, kind]",
            "2 ranks, 4 microbatches",
        ),
        "the library's own": Bad(
            """
def slot(p, m, stage, kind, i):
    run = lab.simulate(lab.schedules.easy_dualpipe(p, m), lab.Cost(F=1, B=1))
    return 0
""",
            "switched off",
        ),
        "equal to everything": Bad(
            EQUAL_TO_ALL + "def slot(p, m, stage, kind, i):\n    return Anything()", "which is no data"
        ),
    },
    "easy_dualpipe-3": {
        "the library's runtime": Bad(
            STEP
            + """
    half = num_microbatches // 2
    program = lab.schedules.easy_dualpipe(2, num_microbatches)
    stages = {0: first, 1: last} if rank == 0 else {1: last, 0: first}
    batch = [inputs, [None] * half] if rank == 0 else [[None] * half, inputs]
    goals = [[None] * half, targets] if rank == 0 else [targets, [None] * half]
    runtime = lab.PipelineRuntime(program, stages, mse_loss, like)
    runtime.step(sum(batch, []), sum(goals, []))
""",
            "switched off",
        ),
        "does nothing": Bad("def two_way_step(*args):\n    pass", "all zero or missing"),
        "makes gradients up": Bad(
            STEP
            + "    for stage in (first, last):\n"
            + "        for p in stage.parameters():\n            p.grad = torch.ones_like(p)",
            "differs from one process",
        ),
    },
    "easy_dualpipe-4": {
        "doubles its own": Bad(
            "def sum_copies(rank, world_size, stages):\n"
            "    for stage in stages.values():\n        for p in stage.parameters():\n            p.grad *= 2",
            "differs from one process",
        ),
        "gathers everything": Bad(
            """
def sum_copies(rank, world_size, stages):
    mine = {s: [p.grad.clone() for p in module.parameters()] for s, module in stages.items()}
    found = comm.all_gather_object(mine)
    for s, module in stages.items():
        for k, p in enumerate(module.parameters()):
            p.grad = sum(part[s][k] for part in found if s in part)
""",
            "bytes",
        ),
    },
}
