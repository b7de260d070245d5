"""Typical wrong answers and lazy cheats of the exercises on training."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"training-{number}" for number in range(1, 5))
NUMBERS = "first, gigabytes, seconds, millionths = "
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
}
