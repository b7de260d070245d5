"""Right answers of another style to the exercises on mixed-precision Adam."""

RIGHT = {
    "mixed_precision_adam-2": {
        "a minimum of what is fine": """
def all_step(gradients, state):
    fine = torch.tensor([float(all(bool(torch.isfinite(g).all()) for g in gradients))])
    comm.all_reduce(fine, "min")
    if fine.item() < 1:
        state["scale"] /= 2
        state["good"] = 0
        return False
    state["good"] = (state["good"] + 1) % state["interval"]
    if not state["good"]:
        state["scale"] *= 2
    return True
""",
        "a sum of the ranks that overflow": """
def all_step(gradients, state):
    bad = torch.tensor(sum(1 for g in gradients if g.isinf().any() or g.isnan().any()))
    comm.all_reduce(bad)
    steps = int(bad) == 0
    good = state["good"] + 1 if steps else 0
    grows = good == state["interval"]
    state.update(scale=state["scale"] * (2 if grows else 1 if steps else 0.5), good=0 if grows else good)
    return steps
""",
    },
    "mixed_precision_adam-3": {
        "torch's usual 1e-6": [("max_norm / float(square.sqrt())", "max_norm / (float(square.sqrt()) + 1e-6)")],
        "the norm unscaled": """
def prepare(gradients, scale, max_norm):
    square = torch.stack([torch.zeros(()), *(g.float().norm() ** 2 for g in gradients)]).sum()
    comm.all_reduce(square)
    norm = square.sqrt() / scale
    factor = (max_norm / norm).clamp(max=1.0) / scale
    return [g.to(torch.float32) * factor for g in gradients]
""",
    },
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
