"""Right answers of another style to the exercises on the options of mixed precision."""

RIGHT = {
    "mixed_precision_options-2": {
        "the lower half as it is": """
def split(master):
    pair = master.view(torch.int16).view(*master.shape, 2)
    low, high = pair[..., 0].clone(), pair[..., 1]
    up = (low < 0).to(torch.int16)  # the upper bit of the lower half: nearer to the next one
    return (high + up).view(torch.bfloat16), low

def join(weight, rest):
    high = weight.view(torch.int16) - (rest < 0).to(torch.int16)
    return torch.stack([rest, high], -1).flatten().view(torch.float32).view(weight.shape)
""",
        "numpy": """
import numpy

def split(master):
    bits = master.numpy().view(numpy.uint32)
    upper = ((bits.astype(numpy.int64) + 32_768) >> 16) << 16
    rest = (bits.astype(numpy.int64) - upper).astype(numpy.int16)
    weight = torch.from_numpy(upper.astype(numpy.uint32).view(numpy.float32)).to(torch.bfloat16)
    return weight, torch.from_numpy(rest)

def join(weight, rest):
    bits = weight.float().numpy().view(numpy.int32) + rest.numpy().astype(numpy.int32)
    return torch.from_numpy(bits.view(numpy.float32))
""",
    },
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
