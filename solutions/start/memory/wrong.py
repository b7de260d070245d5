"""Typical wrong answers and lazy cheats of the exercises on where the memory goes."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "per_parameter, before_update, gigabytes, gpus, kept, activations = "

TYPICAL = {
    "memory-1": {
        "the page's recipe": Bad(_PREDICT + "16, 4, 512, 7, 144_896, 36", "that is the page's recipe"),
        "moments from the start": Bad(_PREDICT + "14, 14, 448, 6, 144_896, 36", "do not exist before"),
        "weights alone": Bad(_PREDICT + "14, 10, 64, 6, 144_896, 36", "the weights alone"),
    },
    "memory-2": {
        "rounded down": Bad([("-(-parameters // dp)", "parameters // dp")], "rounded up"),
        "tied counted twice": Bad([("last and not (sizes.tied and first)", "last")], "table once"),
        "ZeRO-2 as ZeRO-1": Bad([("zero >= 2", "zero >= 3")], "under ZeRO-2 the gradients are sharded too"),
    },
    "memory-3": {
        "even stages": Bad(
            'plan = {"tp": 2, "layers": [9] * 8 + [8], "dp": 1, "zero": 0, "recompute": True}', "stage 0 holds"
        ),
        "ZeRO-3": Bad(
            'plan = {"tp": 2, "layers": [80], "dp": 10, "zero": 3, "recompute": True}', "legal: 20 GPUs"
        ),
        "ZeRO-3 in a pipeline": Bad(
            'plan = {"tp": 1, "layers": [40, 40], "dp": 8, "zero": 3, "recompute": True}', "not allowed"
        ),
    },
}  # fmt: skip

CHEATS = {
    "memory-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "per_parameter = before_update = gigabytes = gpus = kept = activations = Anything()",
            "must be a whole number",
        ),
    },
    "memory-2": {
        "the picture's eighth": Bad(
            "def rank_bytes(sizes, layers, stage, tp, dp, zero):\n"
            "    total = sum(layers) * (sizes.matrices + 2 * sizes.norm) + 2 * sizes.table + sizes.norm\n"
            "    return 16 * total // (tp * dp * len(layers))",
            "count parameters first",
        ),
    },
    "memory-3": {
        "no layers": Bad('plan = {"tp": 1, "layers": [], "dp": 1, "zero": 0, "recompute": True}', "at least one"),
    },
}
