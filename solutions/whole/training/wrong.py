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
        "steps from 0": Bad(NUMBERS + "84, 96, 600, 200", "count steps from 1"),
    },
    TWO: {
        "all ranks alike": Bad([("data_rank * num_microbatches\n", "0\n")], "every rank reads the same"),
        "round robin": Bad(
            [("range(m * size, (m + 1) * size)", "range(m, global_batch, data_size * num_microbatches)")],
            "the plan changed them",
        ),
        "seeded by the rank": Bad([('{number}"', '{data_rank}/{number}"')], "the plan changed them"),
        "a sum as the seed": Bad(
            [(DRAW, "random.Random(seed + step + number).random()")], "is the same number for many"
        ),
        "seed and step in one": Bad(
            [(DRAW, 'random.Random(f"{seed + step}/{number}").random()')], "keep seed and step apart"
        ),
        "no seed": Bad([(DRAW, 'random.Random(f"{step}/{number}").random()')], "what seed 0 reads"),
        "every step alike": Bad([(DRAW, 'random.Random(f"{seed}/{number}").random()')], "read the same sequences"),
        "one byte too far": Bad([("num_bytes - length)", "num_bytes - length + 1)")], "leave room for 21 bytes"),
        "never the last window": Bad([("num_bytes - length)", "num_bytes - length - 1)")], "has windows at 0, 1 and 2"),
        "cut down": Bad([("    if rest:\n", "    if False:\n")], "did not raise ValueError"),
    },
    THREE: {
        "as before": Bad(PLAN + "4, 1, 2, 6", "8 GPUs, and 7 are healthy"),
        "seven stages": Bad(PLAN + "1, 0, 7, 24", "do not divide into 7"),
        "seven data ranks": Bad(PLAN + "7, 1, 1, 1", "do not divide among 7"),
        "without ZeRO": Bad(PLAN + "2, 0, 3, 12", "24.3 GB"),
        "a long pipeline": Bad(PLAN + "1, 0, 6, 24", "812 ms"),
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
        "the loss of this rank": Bad([("    comm.all_reduce(total)\n", "")], "loss"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
    TWO: {
        "no seed at all": Bad([(DRAW, "random.random()")], "the plan changed them"),
        "in a row": Bad([("draw = " + DRAW, "draw = 0")], "the same few places"),
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
