"""Right answers of another style to the exercises on interleaved schedules."""

RIGHT = {
    "interleaved-2": {
        "counters and a position": """
def loop_rows(num_ranks, num_microbatches, num_virtual_stages):
    p, m, v = num_ranks, num_microbatches, num_virtual_stages
    k = max(1, m // p)
    bounds = [-(-m * j // k) for j in range(k + 1)]
    sizes = sorted((b - a for a, b in zip(bounds, bounds[1:])), reverse=True)

    def order(rank, kind):
        start = 0
        for size in sizes:
            for lap in range(v) if kind == "F" else range(v - 1, -1, -1):
                for i in range(start, start + size):
                    yield f"{rank + lap * p}{kind}{i}"
            start += size

    rows = []
    for rank in range(p):
        F, B, words = order(rank, "F"), order(rank, "B"), []
        for _ in range((v - 1) * sizes[0] + 2 * (p - 1 - rank)):
            words.append(next(F, ""))
        for backward in B:
            words += [next(F, ""), backward]
        rows.append(" ".join(filter(None, words)))
    return rows
""",
        "a state machine": """
def loop_rows(num_ranks, num_microbatches, num_virtual_stages):
    p, m, v = num_ranks, num_microbatches, num_virtual_stages
    rounds = max(1, m // p)
    table = [r for r in range(rounds) for _ in range(m // rounds + (r < m % rounds))]
    cells = [(table[i], lap, i) for lap in range(v) for i in range(m)]
    down = sorted(cells)
    up = sorted((r, v - 1 - lap, i) for r, lap, i in cells)
    rows = []
    for rank in range(p):
        ahead = (v - 1) * table.count(0) + 2 * (p - 1 - rank)
        f = b = 0
        row = ""
        while b < v * m:
            if f < v * m and f - b <= ahead:
                row += f"{rank + p * down[f][1]}F{down[f][2]} "
                f += 1
                if f - b <= ahead:
                    continue
            row += f"{rank + p * (v - 1 - up[b][1])}B{up[b][2]} "
            b += 1
        rows.append(row)
    return rows
""",
    },
}
