"""ZB-H1's rows: 1F1B with weight gradients in its gaps."""


def zb_h1_rows(p: int, m: int) -> list[str]:
    """One row for each of p stages; stage s puts its weight gradients s backwards off."""
    rows = []
    for stage in range(p):
        warmup = min(p - 1 - stage, m)
        words = [f"F{i}" for i in range(warmup)]
        for i in range(m):
            words += [f"F{warmup + i}"] * (warmup + i < m) + [f"I{i}"] + [f"W{i - stage}"] * (i >= stage)
        words += [f"W{i}" for i in range(max(m - stage, 0), m)]
        rows.append(" ".join(f"{stage}{word}" for word in words))
    return rows
