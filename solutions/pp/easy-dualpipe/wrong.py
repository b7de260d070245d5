"""Typical wrong answers and lazy cheats of the exercises on Easy-DualPipe."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "bubble, makespan, peak_of_rank_0, peak_of_rank_2"
STEP = "def two_way_step(rank, world_size, first, last, inputs, targets, num_microbatches, like):\n"

TYPICAL = {
    "easy_dualpipe-1": {
        "as many as ranks": Bad(f"{NAMES} = 12, 32, 3, 4", "for m = p"),
        "1F1B": Bad(f"{NAMES} = 25, 45, 6, 4", "1F1B's"),
        "longer gaps": Bad(f"{NAMES} = 18, 38, 3, 4", "the shorter of F and B"),
    },
    "easy_dualpipe-2": {
        "enter one apart": Bad([("2 * place", "place")], "4 ranks, 4 microbatches: rank 2 has both"),
        "no groups": Bad(
            [("2 * num_ranks * group + 2 * place", "2 * (microbatch % (num_microbatches // 2))")], "has both"
        ),
        "groups too far apart": Bad([("2 * num_ranks * group", "3 * num_ranks * group")], "one group of p follows"),
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
    },
    "easy_dualpipe-4": {
        "order only": Bad(
            [("comm.all_reduce(parameter.grad, group=group)", "comm.all_reduce(parameter.grad.div_(2), group=group)")],
            "not averaged",
        ),
        "sum only": Bad([("in sorted(stages)", "in stages")], "must take their stages in one order"),
        "nothing": Bad("def sum_copies(rank, world_size, stages):\n    pass", "direction 0 alone"),
    },
}

CHEATS = {
    "easy_dualpipe-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "easy_dualpipe-2": {
        "the library's own": Bad(
            """
def slot(p, m, stage, kind, i):
    run = lab.simulate(lab.schedules.easy_dualpipe(p, m), lab.Cost(F=1, B=1))
    return 0
""",
            "switched off",
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
    },
    "easy_dualpipe-4": {
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
