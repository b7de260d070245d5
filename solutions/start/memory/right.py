"""Right answers of another style to the exercises on where the memory goes."""

RIGHT = {
    "memory-2": {
        "a list of parameters": """
def rank_bytes(sizes, layers, stage, tp, dp, zero):
    held = [sizes.matrices // tp, sizes.norm, sizes.norm] * layers[stage]
    tables = 0
    if stage == 0:
        tables = 1
    if stage == len(layers) - 1:
        held.append(sizes.norm)
        tables = 1 if sizes.tied else tables + 1
    held.append(tables * sizes.table // tp)
    full = sum(held)
    shard = (full + dp - 1) // dp
    per_level = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}
    whole, cut = per_level[zero]
    return whole * full + cut * shard
""",
        "fields by name, a float": """
from math import ceil

def rank_bytes(sizes, layers, stage, tp, dp, zero):
    ends = {0, len(layers) - 1} if sizes.tied else [0, len(layers) - 1]
    tables = sum(end == stage for end in ends)
    full = (layers[stage] * sizes.matrices + tables * sizes.table) / tp
    full += sizes.norm * (2 * layers[stage] + (stage + 1 == len(layers)))
    total = 0.0
    for level, size in enumerate((12, 2, 2), 1):
        total += size * (ceil(full / dp) if zero >= level else full)
    return total
""",
    },
    "memory-3": {
        "ten layers early": (
            'plan = {"tp": 2, "layers": [8, 9, 9, 9, 9, 9, 9, 10, 8], "dp": 1, "zero": 1, "recompute": True}'
        ),
        "by a loop": """
def first_fit():
    for place in range(1, 8):
        layers = [8, *[9] * 7, 8]
        layers[place] += 1
        last = 12 * 8_192 * 128_256 / 2
        fits = True
        for s, n in enumerate(layers):
            count = (n * 855_638_016 + (s in (0, 8)) * 128_256 * 8_192) / 2
            kept = 2 * 8_192 * ((9 - s) * n * 8_192 + 190_464) / 2
            fits &= 16 * count + kept + (s == 8) * last <= 72e9
        if fits:
            return {"tp": 2, "layers": tuple(layers), "dp": 1, "zero": 0, "recompute": True}

plan = first_fit()
""",
    },
}
