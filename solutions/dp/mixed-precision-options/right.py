"""Right answers of another style to the exercises on the options of mixed precision."""

RIGHT = {
    "mixed_precision_options-3": {
        "a hash of the place": """
import hashlib

def noise(size, seed, step, index, dp_rank, tp_rank, is_cut):
    place = repr((seed, step, index, tp_rank if is_cut else None)).encode()
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(place).digest()[:4], "big"))
    return torch.randint(0, 65_536, (size,), dtype=torch.int32, generator=generator)
""",
        "bits side by side": """
def noise(size, seed, step, index, dp_rank, tp_rank, is_cut):
    generator = torch.Generator()
    generator.manual_seed(index | step << 10 | (tp_rank * is_cut) << 26 | seed << 30)
    return torch.randint(-(2**15), 2**15, (size,), generator=generator, dtype=torch.int32) + 2**15
""",
    },
}
