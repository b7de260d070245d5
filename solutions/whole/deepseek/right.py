"""Right answers of another style to the exercises on a tiny DeepSeek-V3."""

RIGHT = {
    "deepseek-2": {
        "one row of both, then sorted into two": """
def pair(up, down):
    words, left = [], []
    for n in range(len(down) - 1, -1, -1):
        if down[n] == "P":
            left += [f"P_B{n}", f"P_W{n}"]
        elif "S" in down[n]:
            left += [f"C_B{n}", None, f"S_B{n}", f"M_B{n}", f"M_W{n}", f"S_W{n}", f"D_B{n}", None, f"A_B{n}", f"A_W{n}"]
        else:
            left += [f"C_B{n}", None, f"M_B{n}", f"M_W{n}", f"D_B{n}", None, f"A_B{n}", f"A_W{n}"]
    back = []
    while left:
        end = left.index(None) if None in left else len(left)
        back.append(left[:end])
        left = left[end + 1 :]
    if len(back) > 1:
        words += back.pop(0)
    for work, sent in forward_groups(up):
        words += [*work, *sent, *(back.pop(0) if back else [])]
    for rest in back:
        words += rest
    rows = [op for op in words if op[0] not in "DC"], [op for op in words if op[0] in "DC"]
    return rows
""",
        "two lines of text": [
            (
                "return [op for work, _ in order for op in work], [op for _, sent in order for op in sent]",
                'work, sent = zip(*order)\n    return " ".join(sum(work, [])), " ".join(sum(sent, []))',
            )
        ],
    },
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
