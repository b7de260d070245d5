"""Typical wrong answers and lazy cheats of the exercises on mixed-precision Adam."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "first_move, scale, num_steps, bytes_per_parameter"
ROUND = "def round_at_random(x, noise):\n"

TYPICAL = {
    "mixed_precision_adam-1": {
        "whole spacing": Bad(f"{NAMES} = 79, 512, 7, 7", "half is enough"),
        "skipped counted": Bad(f"{NAMES} = 40, 512, 9, 7", "no rank makes"),
        "without shards": Bad(f"{NAMES} = 40, 512, 7, 16", "a rank without shards"),
    },
    "mixed_precision_adam-4": {
        "to the nearest": Bad(ROUND + "    return x.bfloat16()", "stands still"),
        "inf gets noise": Bad(
            [("torch.where(x.isfinite(), (bits + noise) & -(2**16), bits)", "(bits + noise) & -(2**16)")],
            "must stay what they are",
        ),
        "never exact": Bad([("bits + noise", "bits + noise + 1")], "some noise makes it"),
    },
}

CHEATS = {
    "mixed_precision_adam-1": {
        "equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")
    },
    "mixed_precision_adam-4": {
        "the library's own noise": Bad(
            "from dualpipe_lab.dp.adam import stochastic_round\n" + ROUND + "    return stochastic_round(x)", "noises"
        ),
    },
}
