"""Right answers of another style to the exercises on where the memory goes."""

RIGHT = {
    "memory-4": {
        "tensor by tensor": """
from dataclasses import dataclass


@dataclass
class Tensor:
    numel: int
    size: int

    @property
    def nbytes(self):
        return self.numel * self.size


def rank_bytes(numel, num_shared, dtype_bytes, saved_bytes, num_live):
    rest = numel % num_shared
    shard = (numel - rest) // num_shared + bool(rest)
    held = [Tensor(numel, dtype_bytes) for _ in ("weights", "gradients")]
    held += [Tensor(shard, dtype_bytes) for _ in ("first moment", "second moment")]
    held.extend(Tensor(saved_bytes, 1) for _ in range(num_live))
    return sum(tensor.nbytes for tensor in held)
""",
        "by the largest of the shards": """
import math

def per_weight(share: float) -> float:
    return 2 + 2 * share

def rank_bytes(numel, num_shared, dtype_bytes, saved_bytes, num_live):
    states = 2 * math.ceil(numel / num_shared)
    return num_live * saved_bytes + (numel + numel + states) * dtype_bytes
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
