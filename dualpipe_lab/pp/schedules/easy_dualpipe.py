"""Easy-DualPipe: 1F1B in two directions at once; every rank holds two stages and follows one rule.

Chapter: book/pp/easy-dualpipe.  In: P ranks (even), M microbatches (even).  Out: one list of actions per rank.
Half of the microbatches enter at rank 0, where stage s is on rank s; the other half enter at rank P - 1, where stage s
is on rank P - 1 - s.  The weights are twice those of 1F1B, and the mirrors' gradients must be summed before the update.
Elsewhere: at M = P this is Chimera's basic unit.  torch cannot place a stage on two ranks.
Source: Li and Hoefler 2021 (arXiv 2107.06925), section 3: bidirectional pipelines.
"""

from heapq import heappop, heappush

from dualpipe_lab.pp.cost import UNIT_COST, Cost, stage_ticks
from dualpipe_lab.pp.program import Action, B, F, Program, check_counts
from dualpipe_lab.pp.schedules.flush import num_messages
from dualpipe_lab.pp.schedules.schedule import Schedule
from dualpipe_lab.timeline import Time


def easy_dualpipe(num_ranks: int, num_microbatches: int) -> Program:
    """Build the Easy-DualPipe program; raises ValueError for an odd number of ranks or of microbatches.

    The rule: of the ready actions, a rank runs a backward before a forward, then the lower microbatch of its direction,
    then the later stage, as if F and B took one slot each.  Up to M = P each direction alone is 1F1B with M/2
    microbatches.  Where t_F and t_B differ, each further P microbatches add idle time: choose `dualpipe` there.

    >>> print(easy_dualpipe(2, 2))
    # Easy-DualPipe: 2 ranks, 2 stages, 2 microbatches
    rank 0: 0F0 1F1 1B1 0B0
    rank 1: 0F1 1F0 1B0 0B1
    """
    check_easy_dualpipe(num_ranks, num_microbatches)
    last = num_ranks - 1
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    ready: list[list[tuple[bool, int, int, Action]]] = [[] for _ in range(num_ranks)]  # the most urgent first

    def add(stage: int, kind: str, microbatch: int) -> None:
        direction, place = divmod(microbatch, num_microbatches // 2)
        rank = last - stage if direction else stage
        heappush(ready[rank], (kind != B, place, -stage, Action(stage, kind, microbatch)))

    for microbatch in range(num_microbatches):
        add(0, F, microbatch)
    while any(ready):  # one slot; its results are ready in the next slot
        for rank, action in [(rank, heappop(heap)[-1]) for rank, heap in enumerate(ready) if heap]:
            ranks[rank].append(action)
            stage, kind, microbatch = action
            if kind == F:
                add(*((stage + 1, F) if stage < last else (stage, B)), microbatch)
            elif stage > 0:
                add(stage - 1, B, microbatch)
    return Program("Easy-DualPipe", ranks, num_stages=num_ranks, num_microbatches=num_microbatches, num_directions=2)


def check_easy_dualpipe(num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError for sizes that Easy-DualPipe cannot have."""
    check_even_ranks("easy_dualpipe", num_ranks)
    check_even_microbatches("easy_dualpipe", num_microbatches)


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


def easy_dualpipe_bubble(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return the idle time of every rank; ValueError if there is no closed form.

    For M <= P it is (P - 2) * max(t_F, t_B) + (P - M) * min(t_F, t_B), for t_F = t_B and any M
    (P - 2 + (-M mod P)) * t_F.  Both forms need equal stages and free links: checked with the simulator, not proved.

    >>> easy_dualpipe_bubble(4, 4), easy_dualpipe_bubble(8, 8), easy_dualpipe_bubble(8, 2)
    (4, 12, 18)
    """
    check_easy_dualpipe(num_ranks, num_microbatches)
    t = stage_ticks("Easy-DualPipe", num_ranks, cost)
    if num_ranks == 2:
        return 0
    if num_microbatches <= num_ranks:
        return (num_ranks - 2) * max(t.F, t.B) + (num_ranks - num_microbatches) * min(t.F, t.B)
    if t.F == t.B:
        return (num_ranks - 2 + -num_microbatches % num_ranks) * t.F
    raise ValueError(
        f"Easy-DualPipe has a closed form for at most one microbatch per rank, or for F = B, got {num_microbatches} "
        f"microbatches for {num_ranks} ranks, F={t.F}, B={t.B}; use simulate()"
    )


def easy_dualpipe_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return Easy-DualPipe's makespan; ValueError if there is no closed form.

    >>> easy_dualpipe_makespan(4, 4), easy_dualpipe_makespan(8, 8)
    (16, 36)
    """
    bubble = easy_dualpipe_bubble(num_ranks, num_microbatches, cost)
    t = stage_ticks("Easy-DualPipe", num_ranks, cost)
    return bubble + num_microbatches * (t.F + t.B)


def easy_dualpipe_peak_activations(num_ranks: int, num_microbatches: int, rank: int) -> int:
    """Return the most activations that one rank of Easy-DualPipe holds, on both of its stages together.

    They are min(P, M, M/2 + 1 + the distance to the nearer end).

    >>> [easy_dualpipe_peak_activations(8, 8, rank) for rank in range(8)]
    [5, 6, 7, 8, 8, 7, 6, 5]
    """
    distance = min(rank, num_ranks - 1 - rank)
    return min(num_ranks, num_microbatches, num_microbatches // 2 + 1 + distance)


SCHEDULES = (
    Schedule("easy_dualpipe", easy_dualpipe, easy_dualpipe_makespan, easy_dualpipe_peak_activations, num_messages),
)
