"""What schedules that feed the pipeline from both ends ask of their sizes.

Chapter: book/pp/easy-dualpipe.  In: a number of ranks or of microbatches.  Out: nothing, or ValueError.
"""

from dualpipe_lab.pp.program import check_counts


def check_even(builder: str, num_ranks: int, num_microbatches: int, instead: str = "") -> None:
    """Raise ValueError unless there are two equal halves of ranks and of microbatches.

    `instead`: a schedule that takes an odd number of ranks.
    """
    check_counts(builder, num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_ranks % 2:
        raise ValueError(
            f"{builder} needs an even number of ranks, got {num_ranks}: the middle one would hold its stage twice; "
            f"use {instead}{_even_neighbours(num_ranks)} ranks"
        )
    if num_microbatches % 2:
        raise ValueError(
            f"{builder} needs an even number of microbatches, half for each direction, got {num_microbatches}; "
            f"use {_even_neighbours(num_microbatches)}"
        )


def _even_neighbours(odd: int) -> str:
    return f"{odd - 1} or {odd + 1}" if odd > 1 else "2"
