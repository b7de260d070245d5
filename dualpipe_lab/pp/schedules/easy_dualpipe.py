"""Easy-DualPipe: 1F1B in two directions at once; every rank holds two stages and follows one rule.

Chapter: book/pp/easy-dualpipe.  In: P ranks (even), M microbatches (even).  Out: one list of actions per rank.
Half of the microbatches enter at rank 0, where stage s is on rank s; the other half enter at rank P - 1, where stage s
is on rank P - 1 - s.  The rule: of the ready actions, a rank runs a backward before a forward, then the lower
microbatch of its direction, then the later stage, as if F and B took one slot each.  The mirrors' gradients must be
  summed. bubble             (P - 2) * max(t_F, t_B)   at M = P, see `closed_forms.easy_dualpipe_bubble`
  live activations   from P/2 + 1 on the outer ranks to P on the two middle ranks
  weights            twice those of 1F1B
  messages           2 * (P - 1) * M
Up to M = P each direction alone is 1F1B with M/2 microbatches.  Longer batches run too, but where t_F and t_B differ,
each further P microbatches add idle time: choose `dualpipe` there.
Elsewhere: at M = P this is Chimera's basic unit.  torch cannot place a stage on two ranks.
Source: Li and Hoefler 2021 (arXiv 2107.06925), section 3: bidirectional pipelines.
"""

from heapq import heappop, heappush

from dualpipe_lab.pp.program import Action, B, F, Program
from dualpipe_lab.pp.schedules.two_directions import check_even_microbatches, check_even_ranks


def easy_dualpipe(num_ranks: int, num_microbatches: int) -> Program:
    """Build the Easy-DualPipe program; raises ValueError for an odd number of ranks or of microbatches.

    >>> print(easy_dualpipe(2, 2))
    # Easy-DualPipe: 2 ranks, 2 stages, 2 microbatches
    rank 0: 0F0 1F1 1B1 0B0
    rank 1: 0F1 1F0 1B0 0B1
    """
    check_easy_dualpipe(num_ranks, num_microbatches)
    ready = _Ready(num_ranks, num_microbatches // 2)
    for microbatch in range(num_microbatches):
        ready.add(Action(0, F, microbatch))
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    while any(ready.by_rank):  # one slot; its results are ready in the next slot
        taken = [(rank, ready.take(rank)) for rank in range(num_ranks) if ready.by_rank[rank]]
        for rank, action in taken:
            ranks[rank].append(action)
            ready.add_next(action)
    return Program("Easy-DualPipe", ranks, num_stages=num_ranks, num_microbatches=num_microbatches, num_directions=2)


def check_easy_dualpipe(num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError for sizes that Easy-DualPipe cannot have."""
    check_even_ranks("easy_dualpipe", num_ranks)
    check_even_microbatches("easy_dualpipe", num_microbatches)


class _Ready:
    """The ready actions of each rank, the most urgent first."""

    def __init__(self, num_ranks: int, per_direction: int) -> None:
        self.last = num_ranks - 1
        self.per_direction = per_direction
        self.by_rank: list[list[tuple[bool, int, int, Action]]] = [[] for _ in range(num_ranks)]

    def add(self, action: Action) -> None:
        direction, place = divmod(action.microbatch, self.per_direction)
        rank = self.last - action.stage if direction else action.stage
        heappush(self.by_rank[rank], (action.kind != B, place, -action.stage, action))

    def take(self, rank: int) -> Action:
        return heappop(self.by_rank[rank])[-1]

    def add_next(self, done: Action) -> None:
        stage, kind, microbatch = done
        if kind == F:
            self.add(Action(stage + 1, F, microbatch) if stage < self.last else Action(stage, B, microbatch))
        elif stage > 0:
            self.add(Action(stage - 1, B, microbatch))
