"""Typical wrong answers and lazy cheats of the exercises on mixed-precision Adam."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "first_move, scale, num_steps, bytes_per_parameter"
STEP = "def all_step(gradients, state):\n"
ROUND = "def round_at_random(x, noise):\n"

TYPICAL = {
    "mixed_precision_adam-1": {
        "whole spacing": Bad(f"{NAMES} = 79, 512, 7, 7", "half is enough"),
        "skipped counted": Bad(f"{NAMES} = 40, 512, 9, 7", "no rank makes"),
        "without shards": Bad(f"{NAMES} = 40, 512, 7, 16", "a rank without shards"),
    },
    "mixed_precision_adam-2": {
        "alone": Bad([('    comm.all_reduce(found, "max")\n', "")], "leaves the others behind"),
        "counts on": Bad([('state["scale"] * 0.5, 0', 'state["scale"] * 0.5, state["good"]')], "torch has"),
        "nan is no inf": Bad([("not gradient.isfinite().all()", "gradient.isinf().any()")], "has a nan"),
    },
    "mixed_precision_adam-3": {
        "only in fp32": Bad(
            """
def prepare(gradients, scale, max_norm):
    square = sum((g.float().square().sum() for g in gradients), torch.zeros(1))
    comm.all_reduce(square)
    factor = min(1.0, max_norm / float(square.sqrt()))
    return [g.float() * factor / scale for g in gradients]
""",
            "clipped before it was unscaled",
        ),
        "divided in fp16": Bad([("gradient.float() / scale", "(gradient / scale).float()")], "convert to fp32"),
        "own norm": Bad([("    comm.all_reduce(square)\n", "")], "this rank's own norm"),
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
    "mixed_precision_adam-2": {
        "the library's": Bad(
            "from dualpipe_lab.dp.mixed_precision import LossScaler\n"
            + STEP
            + "    scaler = LossScaler(state['scale'], interval=state['interval'])\n"
            + "    found = scaler.found_inf(gradients)\n    scaler.update(found)\n    return not found",
            "switched off",
        ),
    },
    "mixed_precision_adam-3": {
        "gives back": Bad("def prepare(gradients, scale, max_norm):\n    return gradients", "float16"),
    },
    "mixed_precision_adam-4": {
        "the library's own noise": Bad(
            "from dualpipe_lab.dp.adam import stochastic_round\n" + ROUND + "    return stochastic_round(x)", "noises"
        ),
    },
}
