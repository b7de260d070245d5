"""GPipe's rows: all forwards, then all backwards."""


def gpipe_rows(p: int, m: int) -> list[str]:
    """One row for each of p stages, of m microbatches."""
    return [" ".join(f"{stage}{kind}{i}" for kind in "FB" for i in range(m)) for stage in range(p)]


def gpipe_place(stage: int, microbatch: int) -> int:
    """The position that runs a stage."""
    return stage
