"""Right answers of another style to the exercises on a tiny DeepSeek-V3."""

RIGHT = {
    "deepseek-4": {
        "all stages in one sum": """
def balance(biases, loads, ep, pp, speed):
    stages = sorted(biases)
    total = torch.stack([loads[s] for s in stages])
    for group in (pp, ep):
        comm.all_reduce(total, group=group)
    for s, load in zip(stages, total):
        mean = load.sum() / len(load)
        biases[s].sub_(speed * ((load > mean).double() - (load < mean).double()))
""",
        "over the world": """
def balance(biases, loads, ep, pp, speed):
    for stage in (0, 1):
        comm.all_reduce(loads[stage])
        fewer = loads[stage] < loads[stage].mean()
        more = loads[stage] > loads[stage].mean()
        biases[stage][fewer] += speed
        biases[stage][more] -= speed
""",
    },
}
