"""1F1B's rows: a backward as soon as there is one."""


def one_f_one_b_rows(p: int, m: int) -> list[str]:
    """One row for each of p stages, of m microbatches."""
    rows = []
    for stage in range(p):
        warmup = min(p - 1 - stage, m)  # forwards that fill the stages behind this one
        words = [f"F{i}" for i in range(warmup)]
        words += [word for i in range(m - warmup) for word in (f"F{warmup + i}", f"B{i}")]
        words += [f"B{i}" for i in range(m - warmup, m)]
        rows.append(" ".join(f"{stage}{word}" for word in words))
    return rows
