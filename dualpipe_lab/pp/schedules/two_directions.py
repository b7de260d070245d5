"""Checks of the sizes of schedules with two directions.

Chapter: book/pp/easy-dualpipe.  In: a number of ranks or of microbatches.  Out: nothing, or ValueError.
"""

from dualpipe_lab.pp.program import check_counts


def check_even_ranks(builder: str, num_ranks: int, instead: str = "") -> None:
    """Raise ValueError for an odd number of ranks; `instead` names a schedule that accepts it."""
    check_counts(builder, num_ranks=num_ranks)
    if num_ranks % 2:
        raise ValueError(
            f"{builder} needs an even number of ranks, got {num_ranks}: the middle one would hold its stage twice; "
            f"use {instead}{_even_neighbours(num_ranks)} ranks"
        )


def check_even_microbatches(builder: str, num_microbatches: int) -> None:
    """Raise ValueError for an odd number of microbatches."""
    check_counts(builder, num_microbatches=num_microbatches)
    if num_microbatches % 2:
        raise ValueError(
            f"{builder} needs an even number of microbatches, half for each direction, got {num_microbatches}; "
            f"use {_even_neighbours(num_microbatches)}"
        )


def _even_neighbours(odd: int) -> str:
    return f"{odd - 1} or {odd + 1}" if odd > 1 else "2"
