"""Judging rows of a loop, and rows of 1F1B: their ticks with free and with slow links, and what each rank holds."""

from dualpipe_course.pp.programs import parse
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.closed_forms import interleaved_makespan, interleaved_peak_activations
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import B, F, Program
from dualpipe_lab.pp.schedules.looped import interleaved
from dualpipe_lab.pp.simulator import simulate

SLOW = Cost(latency=1)


def check_loop(answer: object, num_ranks: int, num_microbatches: int, num_virtual_stages: int) -> None:
    """Raise `Wrong` unless the rows are interleaved 1F1B's in everything but perhaps their order."""
    program = parse(answer, num_ranks, num_microbatches, num_virtual_stages * num_ranks)
    only_whole_backwards(program)
    for (stage, microbatch), rank in sorted(program.placement.items()):
        if rank != stage % num_ranks:
            raise Wrong(f"{stage}F{microbatch} is on rank {rank}; on a loop stage s is on rank s % {num_ranks}")
    timeline = simulate(program)
    best = interleaved_makespan(num_ranks, num_microbatches, num_virtual_stages)
    if timeline.makespan > best:
        raise Wrong(
            f"{timeline.makespan} ticks with free messages, {best} are possible; a rank waits where its warm-up is "
            f"too short, and where one of several rounds has fewer than {num_ranks} microbatches",
            picture=timeline,
        )
    for rank in range(num_ranks):
        held = timeline.peak_activations(rank)
        bound = interleaved_peak_activations(num_ranks, num_microbatches, rank, num_virtual_stages)
        if held > bound:
            raise Wrong(
                f"rank {rank} holds {held} small stages, {bound} are enough; make the rounds as equal as can be, "
                "and the warm-up no deeper than the first one needs",
                picture=timeline,
            )
    quick = simulate(interleaved(num_ranks, num_microbatches, num_virtual_stages), SLOW)
    slow = simulate(program, SLOW)
    if slow.makespan > quick.makespan:
        raise Wrong(
            f"{slow.makespan} ticks if a message takes one tick, {quick.makespan} are possible; each rank warms up "
            "with two forwards more than the next one, to leave messages time",
            picture=slow,
        )


def only_whole_backwards(program: Program) -> None:
    """Raise `Wrong` if the rows have an I, a W or a message."""
    if others := sorted({action.kind for action in program} - {F, B}):
        raise Wrong(f"the rows contain {others[0]}; this program is made of F and B")
