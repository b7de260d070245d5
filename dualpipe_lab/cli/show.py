"""`show NAME`: prints one schedule as text and numbers, or writes it to files."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from dualpipe_lab.cli.files import Csv, Html, Perfetto, Png, Svg, columns, write
from dualpipe_lab.cli.inputs import Microbatches, Ranks, StageCost, check_size, costs_of, only, read_cost, words_of
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.ranking import local_bubble, score, share
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Time, Timeline
from dualpipe_lab.timeline.units import number


def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="a schedule, or a CSV file, which has its own size")],
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    cost: StageCost = None,
    svg: Svg = None,
    png: Png = None,
    html: Html = None,
    csv: Csv = None,
    perfetto: Perfetto = None,
) -> None:
    """Print a schedule's timeline and numbers, or write it to files.

    Other options, such as --virtual-stages 3, go to the schedule's builder.
    """
    asked = only("show", name, context)
    check_size(ranks, microbatches, asked)
    program, costs = asked.build(ranks, microbatches), read_cost(cost)
    files = {"svg": svg, "png": png, "html": html, "csv": csv, "perfetto": perfetto}
    if not any(files.values()):
        timeline = simulate(program, costs)
        print(timeline.to_text(columns()))
        print("\n".join(["", *_numbers(program, timeline, costs)]))
    write(files, program, costs)


def _numbers(program: Program, timeline: Timeline, cost: Cost) -> Iterator[str]:
    """Yield one line for each number, with its unit."""
    ranks = range(timeline.num_ranks)
    idle = [timeline.bubble_time(rank) for rank in ranks]
    peaks = [timeline.peak_activations(rank) for rank in ranks]
    stages = [len({action.stage for action in program.actions(rank)}) for rank in ranks]
    yield _line(
        "size", f"{program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches"
    )
    yield _line("costs", f"{words_of(costs_of(cost))} (ticks of a stage)")
    yield _line("makespan", f"{number(timeline.makespan)} ticks")
    yield _line("bubble", f"{timeline.bubble_fraction:.1%} of all ranks' time; a rank idles {_range(idle)} ticks")
    yield _line(
        "local bubble", f"{number(local_bubble(timeline))} ticks at most between a rank's first and last action"
    )
    yield _line("activations", f"{_range(peaks)} at most on a rank, one stage and microbatch each")
    if any(waiting := [timeline.peak_pending_weight_grads(rank) for rank in ranks]):
        yield _line("waiting W", f"{_range(waiting)} at most on a rank, between I and W")
    yield _line("weights", f"{_range(stages)} of {program.num_stages} stages on a rank")
    yield _line("messages", str(len(timeline.messages)))
    if share(program) != 1:
        fair = score(program, cost)
        sizes = f"{number(fair.makespan)} ticks, {number(fair.peak)} activations, {number(fair.weights)} of the weights"
        yield _line("in compare", f"{sizes}: there the costs are those of 1/{program.num_ranks} of the model")


def _line(what: str, value: str) -> str:
    return f"{what:<15}{value}"


def _range(values: Sequence[Time]) -> str:
    least, most = min(values), max(values)
    return number(most) if least == most else f"{number(least)} to {number(most)}"
