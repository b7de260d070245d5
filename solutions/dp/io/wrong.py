"""Typical wrong answers and lazy cheats of the exercises on saving and loading."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "last_file, files_of_rank_1, from_file_1, ranges"

TYPICAL = {
    "io-1": {
        "fair shares": Bad(f"{NAMES} = 30, 2, 24, 6", "elements are not cut"),
        "weights alone": Bad(f"{NAMES} = 4, 2, 8, 6", "two moments"),
        "whole file 1": Bad(f"{NAMES} = 12, 2, 36, 6", "goes to rank 0"),
    },
    "io-4": {
        "the batch for the step": Bad([('saved["num_steps"]', 'saved["next_batch"]')], "counts 12 steps, 10 were made"),
        "the step for the batch": Bad([('return saved["next_batch"]', 'return saved["num_steps"]')], "batch is number"),
        "steps only": Bad([('["random"][rank]', '["random"][0]')], "those of rank 0"),
    },
}  # fmt: skip

CHEATS = {
    "io-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "io-4": {
        "nothing": Bad("def resume(saved, adam, rank):\n    return saved['next_batch']", "the weights are not"),
    },
}
