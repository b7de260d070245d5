"""Right answers of another style to the exercises on mixed-precision Adam."""

RIGHT = {
    "mixed_precision_adam-4": {
        "neighbours and a comparison": """
def round_at_random(x, noise):
    bits = x.view(torch.int32)
    low = bits & -65536
    rest = bits - low
    up = low + 65536
    chosen = torch.where(noise >= 65536 - rest, up, low)
    return torch.where(x.isfinite(), chosen.view(torch.float32), x).to(torch.bfloat16)
""",
        "masked assignment": """
def round_at_random(x, noise):
    out = x.bfloat16()
    finite = x.isfinite()
    moved = x[finite].contiguous().view(torch.int32) + noise[finite]
    out[finite] = ((moved >> 16) << 16).view(torch.float32).bfloat16()
    return out
""",
    },
}
