"""Typical wrong answers and lazy cheats of the exercises on training."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"training-{number}" for number in range(1, 5))
NUMBERS = "first, gigabytes, seconds, millionths = "
PLAN = "dp, zero, pp, microbatches = "
DRAW = 'random.Random(f"{seed}/{step}/{number}").random()'

TYPICAL = {
    ONE: {
        "the beginning of the rank": Bad(NUMBERS + "72, 96, 600, 300", "the beginning of the rank"),
        "with gradients": Bad(NUMBERS + "84, 128, 600, 300", "gradients are not saved"),
        "the whole interval": Bad(NUMBERS + "84, 96, 1200, 300", "the middle of an interval"),
    },
    TWO: {
        "all ranks alike": Bad([("data_rank * num_microbatches\n", "0\n")], "every rank reads the same"),
        "round robin": Bad(
            [("range(m * size, (m + 1) * size)", "range(m, global_batch, data_size * num_microbatches)")],
            "the plan changed them",
        ),
        "a sum as the seed": Bad(
            [(DRAW, "random.Random(seed + step + number).random()")], "is the same number for many"
        ),
    },
    THREE: {
        "as before": Bad(PLAN + "4, 1, 2, 6", "8 GPUs, and 7 are healthy"),
        "seven stages": Bad(PLAN + "1, 0, 7, 24", "do not divide into 7"),
        "ZeRO-3": Bad(PLAN + "2, 3, 3, 12", "zero is 0 or 1"),
    },
    FOUR: {
        "averaged over ranks": Bad(
            [
                ("    comm.all_reduce(count)\n", ""),
                ("(table.grad)", '(table.grad, "avg")'),
                ("comm.all_reduce(total)", 'comm.all_reduce(total, "avg")'),
            ],
            "the mean of the ranks' means",
        ),
        "counts padding": Bad([("(targets >= 0).sum()", "torch.tensor(targets.numel())")], "mean over all places"),
        "a sum": Bad([(" / count", "")], "this is the sum over all targets"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
    TWO: {
        "the library's": Bad(
            """
def windows(num_bytes, length, global_batch, seed, step, data_rank, data_size, num_microbatches):
    from dualpipe_lab.train import Sampler

    text = bytes(num_bytes)
    rows = Sampler(text, length, global_batch, seed).batch(step, num_microbatches, data_rank, data_size)
    return [[0] * len(part) for part in rows.inputs]
""",
            "switched off",
        ),
    },
    THREE: {"nothing": Bad(PLAN + "0, 0, 0, 0", "count from 1")},
    FOUR: {"nothing": Bad("def mean_step(table, batch):\n    return 0.0", "loss")},
}
