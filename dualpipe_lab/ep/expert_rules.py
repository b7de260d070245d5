"""Which numbers of experts, groups and ranks fit together; needs no torch, so that a config can be checked without it.

Chapter: book/ep/v3-moe.  In: numbers.  Out: experts per rank, or one message with a remedy.
  ranks     share the experts evenly
  groups    of equal size, of which those that a token uses offer at least its k experts
"""


def check_divides(num_experts: int, ep_size: int) -> int:
    """Return the number of experts per rank; it can be called before any process starts.

    >>> check_divides(8, 4)
    2

    Raises:
        ValueError: the experts do not divide among the ranks.
    """
    if num_experts < 1 or num_experts % ep_size:
        sizes = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise ValueError(
            f"experts must divide among the ranks, got {num_experts} experts on {ep_size} ranks; "
            f"use {', '.join(map(str, sizes))} ranks, or {-(-max(num_experts, 1) // ep_size) * ep_size} experts"
        )
    return num_experts // ep_size


def check_groups(num_experts: int, num_experts_per_token: int, num_groups: int, num_groups_per_token: int) -> None:
    """Refuse groups of experts that cannot work; it can be called before any process starts.

    Raises:
        ValueError: naming the rule and the values.

    >>> check_groups(256, 8, 8, 4)
    >>> check_groups(8, 4, 4, 1)
    Traceback (most recent call last):
    ValueError: 1 groups of 2 experts offer 2, a token needs 4; use num_groups_per_token=2
    """
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"groups divide the experts, got {num_experts} experts in {num_groups} groups")
    if not 1 <= num_groups_per_token <= num_groups:
        raise ValueError(f"a token uses 1..{num_groups} of {num_groups} groups, got {num_groups_per_token}")
    size = num_experts // num_groups
    if num_groups_per_token * size < num_experts_per_token <= num_experts:
        raise ValueError(
            f"{num_groups_per_token} groups of {size} experts offer {num_groups_per_token * size}, a token needs "
            f"{num_experts_per_token}; use num_groups_per_token={-(-num_experts_per_token // size)}"
        )
