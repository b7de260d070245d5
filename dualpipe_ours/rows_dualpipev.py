"""DualPipeV's rows: the upper half of DualPipe's, unfolded."""

from .row_messages import Place
from .rows_dualpipe import named, words


def dualpipev_rows(p: int, m: int) -> list[str]:
    """One row for each of p positions with two of 2 p stages."""
    return [named(words(r, 2 * p, 2 * m), ((r, 0), (2 * p - 1 - r, 0))) for r in range(p)]


def dualpipev_place(p: int) -> Place:
    """A function of stage and microbatch: the position, down one leg of the V and up the other."""
    return lambda stage, i: min(stage, 2 * p - 1 - stage)
