"""Typical wrong answers and lazy cheats of the exercises on mixed-precision Adam."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "first_move, scale, num_steps, bytes_per_parameter"
STEP = "def all_step(gradients, state):\n"
ROUND = "def round_at_random(x, noise):\n"

TYPICAL = {
    "mixed_precision_adam-1": {
        "whole spacing": Bad(f"{NAMES} = 79, 512, 7, 7", "half is enough"),
        "spacing below 1": Bad(f"{NAMES} = 20, 512, 7, 7", "twice that"),
        "count goes on": Bad(f"{NAMES} = 40, 1024, 7, 7", "the last overflow"),
        "skipped counted": Bad(f"{NAMES} = 40, 512, 9, 7", "no rank makes"),
        "without shards": Bad(f"{NAMES} = 40, 512, 7, 16", "a rank without shards"),
        "all divided": Bad(f"{NAMES} = 40, 512, 7, 4", "stay whole"),
    },
    "mixed_precision_adam-2": {
        "alone": Bad([('    comm.all_reduce(found, "max")\n', "")], "leaves the others behind"),
        "counts on": Bad([('state["scale"] * 0.5, 0', 'state["scale"] * 0.5, state["good"]')], "torch has"),
        "nan is no inf": Bad([("not gradient.isfinite().all()", "gradient.isinf().any()")], "has a nan"),
        "sum": Bad([("not gradient.isfinite().all()", "not gradient.sum().isfinite()")], "60000 are no overflow"),
        "interval off by one": Bad([('if state["good"] == state', 'if state["good"] > state')], "torch has"),
        "a message per gradient": Bad(
            [("    if found:\n", "    comm.all_reduce(found)\n    if found:\n")],
            "one per step",
        ),
        "returns a tensor": Bad([("return True", "return found == 0")], "returned a Tensor"),
    },
    "mixed_precision_adam-3": {
        "the factor in fp16": Bad(
            """
def prepare(gradients, scale, max_norm):
    square = sum(((g.float() / scale).square().sum() for g in gradients), torch.zeros(1))
    comm.all_reduce(square)
    factor = min(1.0, max_norm / float(square.sqrt()))
    return [(g * factor).float() / scale for g in gradients]
""",
            "was rounded to fp16 on the way",
        ),
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
        "sum of norms": Bad(
            [
                ("    comm.all_reduce(square)\n", "    norm = square.sqrt()\n    comm.all_reduce(norm)\n"),
                ("float(square.sqrt())", "float(norm)"),
            ],
            "their squares do",
        ),
        "never unscaled": Bad([(".float() / scale", ".float()"), ("square.sqrt()", "square.sqrt() / scale")], "scale"),
        "in place": Bad(
            [("    gradients = [", "    for g in gradients:\n        g.div_(1)\n        g.add_(1)\n    gradients = [")],
            "changed the gradients",
        ),
    },
    "mixed_precision_adam-4": {
        "spoils x": Bad(
            [("    return rounded", "    x.zero_()\n    return rounded")],
            "x has changed",
        ),
        "to the nearest": Bad(ROUND + "    return x.bfloat16()", "stands still"),
        "inf gets noise": Bad(
            [("torch.where(x.isfinite(), (bits + noise) & -(2**16), bits)", "(bits + noise) & -(2**16)")],
            "must stay what they are",
        ),
        "noise of 15 bits": Bad([("bits + noise", "bits + noise // 2")], "stands still"),
        "half away": Bad(
            ROUND
            + "    low = (x.view(torch.int32) & -(2**16))\n"
            + "    up = low + 2**16 * ((noise % 2 == 1) & (x.view(torch.int32) != low)).int()\n"
            + "    return torch.where(x.isfinite(), up.view(torch.float32), x).bfloat16()",
            "noises go up",
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
        "always steps": Bad(STEP + "    state['good'] = 1\n    return True", "has an inf"),
    },
    "mixed_precision_adam-3": {
        "one number for each": Bad(
            [("return [gradient * factor for", "return [(gradient * factor).sum()[None] for")], "a tensor of shape [1]"
        ),
        "gives back": Bad("def prepare(gradients, scale, max_norm):\n    return gradients", "float16"),
        "nothing": Bad("def prepare(gradients, scale, max_norm):\n    return []", "expected one fp32 tensor"),
    },
    "mixed_precision_adam-4": {
        "the library's own noise": Bad(
            "from dualpipe_lab.dp.adam import stochastic_round\n" + ROUND + "    return stochastic_round(x)", "noises"
        ),
        "fp32": Bad(ROUND + "    return x", "expected a bf16 tensor"),
    },
}
