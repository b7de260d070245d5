"""Routes: the rank of every stage, in order, for each microbatch.

A program with each stage on one rank has one route.  DualPipe has two: every stage has a copy on a second rank, and
each microbatch keeps to one direction.  A microbatch that changes its direction has a route of its own; its gradient is
right once the copies are summed.  A program that states `num_directions` may not have more routes than that; a program
that does not may have any number.
"""

from collections import Counter
from typing import TypeAlias

from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.validation.errors import ProblemList

Route: TypeAlias = tuple[int, ...]


def routes(program: Program) -> list[Route]:
    """Return the route of every microbatch of a complete program.

    >>> routes(Program.parse("two directions", ["0F0 1F1 0B0 1B1", "0F1 1F0 0B1 1B0"]))
    [(0, 1), (1, 0)]
    """
    stages, place = range(program.num_stages), program.placement
    return [tuple([place[stage, microbatch] for stage in stages]) for microbatch in range(program.num_microbatches)]


def check_routes(program: Program, problems: ProblemList) -> None:
    """Report routes beyond the number that the program states, the rarest first."""
    stated = program.num_directions
    if stated is None:
        return
    taken = routes(program)
    often = [route for route, _ in Counter(taken).most_common(stated)]
    for microbatch, route in enumerate(taken):
        if route not in often:
            nearest = min(often, key=lambda known: _differing(route, known))
            stage = next(s for s, rank in enumerate(route) if rank != nearest[s])
            allowed = "every stage on one rank" if stated == 1 else f"no more than {stated} routes"
            problems.add(
                f"stage {stage} works on microbatch {microbatch} on rank {route[stage]}, on microbatch "
                f"{taken.index(nearest)} on rank {nearest[stage]}; num_directions={stated} allows {allowed}: move it "
                f"there, or state num_directions={1 + stated}"
            )


def _differing(one: Route, other: Route) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))
