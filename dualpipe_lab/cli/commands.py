"""The commands: `show`, `compare`, `explain` schedules; `plan` a run; `convert` weights.

Chapter: book/appendix/command-line.  Each prints, or writes files; `app` prints a ValueError as one line.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from dualpipe_lab.cli.inputs import (
    Csv,
    CsvFile,
    Html,
    Memory,
    Microbatches,
    Perfetto,
    Png,
    Ranks,
    ShareCost,
    StageCost,
    Svg,
    check_size,
    columns,
    export_program,
    flag_of,
    only,
    read_cost,
    split,
    wanted,
    words_of,
    write,
)
from dualpipe_lab.plan.fits import fits
from dualpipe_lab.plan.hardware import H100
from dualpipe_lab.plan.model_of import model_of
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.ranking import Score, local_bubble, ranked, score, share
from dualpipe_lab.pp.schedules.variants import Variant
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
    if not write(files, partial(export_program, program, costs)):
        timeline = simulate(program, costs)
        print(timeline.to_text(columns()), end="\n\n")
        for what, value in _numbers(program, timeline, costs):
            print(f"{what:<15}{value}")


def _numbers(program: Program, timeline: Timeline, cost: Cost) -> Iterator[tuple[str, str]]:
    ranks = range(timeline.num_ranks)
    idle = [timeline.bubble_time(rank) for rank in ranks]
    peaks = [timeline.peak_activations(rank) for rank in ranks]
    stages = [len(program.stages_of(rank)) for rank in ranks]
    yield "size", f"{program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches"
    yield "costs", f"{words_of(cost)} (ticks of a stage)"
    yield "makespan", f"{number(timeline.makespan)} ticks"
    yield "bubble", f"{timeline.bubble_fraction:.1%} of all ranks' time; a rank idles {_range(idle)} ticks"
    yield "local bubble", f"{number(local_bubble(timeline))} ticks at most between a rank's first and last action"
    yield "activations", f"{_range(peaks)} at most on a rank, one stage and microbatch each"
    if any(waiting := [timeline.peak_pending_weight_grads(rank) for rank in ranks]):
        yield "waiting W", f"{_range(waiting)} at most on a rank, between I and W"
    yield "weights", f"{_range(stages)} of {program.num_stages} stages on a rank"
    yield "messages", str(len(timeline.messages))
    if share(program) != 1:
        fair = score(program, cost)
        sizes = f"{number(fair.makespan)} ticks, {number(fair.peak)} activations, {number(fair.weights)} of the weights"
        yield "in compare", f"{sizes}: there the costs are those of 1/{program.num_ranks} of the model"


def _range(values: Sequence[Time]) -> str:
    least, most = min(values), max(values)
    return number(most) if least == most else f"{number(least)} to {number(most)}"


Asked: TypeAlias = Variant | CsvFile
_COLUMNS = ("", "schedule", "makespan", "bubble", "window", "local", "activations", "weights", "pairs", "messages")


def compare(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="schedules, also interleaved:num_virtual_stages=3; none: all synchronous ones"),
    ] = None,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    cost: ShareCost = None,
    memory: Memory = None,
    barrier: Annotated[bool, typer.Option(help="whether the ranks wait for each other after each step")] = True,
    pairs: Annotated[
        bool | None, typer.Option(help="whether all may overlap F with B, or none; all if FB is given")
    ] = None,
) -> None:
    """Rank schedules: those within the memory limit first, the quickest of them at the top.

    Without names, schedules run as their twins with overlapped pairs, or nobody overlaps: one rule for all.
    Other options, such as --virtual-stages 3, go to the builders that have them.
    """
    costs = read_cost(cost)
    may_pair = costs.overlap is not None if pairs is None else pairs
    costs = costs if may_pair else replace(costs, overlap=None)
    given, options = split([*(names or []), *context.args])
    asked = [wanted(name) for name in given or schedules.names(synchronous=True, pairs=may_pair)]
    for option in options:
        if not any(one.has(option) for one in asked):
            raise ValueError(f"none of these schedules has the option {flag_of(option)}")
    asked = [one.with_options({key: value for key, value in options.items() if one.has(key)}) for one in asked]
    check_size(ranks, microbatches, *asked)
    scores, refused = _scores(asked, (ranks, microbatches), costs)
    console = Console(width=None if Console().is_terminal else 120)
    print(f"{ranks} ranks, {microbatches} microbatches; a rank's share of the model costs {words_of(costs)}")
    print(f"overlapped pairs: {'for all that have them' if may_pair else 'none, a pair takes F and then B'}")
    if scores:
        console.print(_table(ranked(scores, memory, barrier), memory))
    for name, reason in refused:
        print(f"{name}: {reason}")
    for one in asked:
        if may_pair and isinstance(one, Variant) and (twin := schedules.named(one.name).paired):
            print(f"{one}: it has no pairs; {twin} has")
        if isinstance(one, Variant) and not schedules.named(one.name).is_synchronous:
            print(
                f"{one}: it updates the weights between microbatches, so it computes another gradient than the others"
            )
    if not scores:
        raise ValueError("none of these schedules has this size")


def _scores(asked: list[Asked], size: tuple[int, int], cost: Cost) -> tuple[list[Score], list[tuple[str, str]]]:
    scores, refused = [], []
    for one in asked:
        try:
            program = one.build(*size)
        except ValueError as reason:
            if isinstance(one, CsvFile):
                raise
            refused.append((str(one), str(reason)))
            continue
        if (program.num_ranks, program.num_microbatches) != size:
            has = f"{program.num_ranks} ranks and {program.num_microbatches} microbatches"
            refused.append((one.name, f"it is for {has}; choose --ranks and --microbatches like it"))
            continue
        scores.append(score(program, cost)._replace(name=one.title(program)))
    return scores, refused


def _table(scores: list[Score], memory: int | None) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for place, one in enumerate(scores, 1):
        fits = one.fits(memory)
        times = number(one.makespan), f"{one.bubble:.1%}", number(one.window), number(one.local_bubble)
        peak = number(one.peak) + ("" if fits else " > limit")
        counts = map(number, (one.weights, one.pairs, one.messages))
        table.add_row(str(place) if fits else "-", one.name, *times, peak, *counts, style=None if fits else "dim")
    return table


def explain(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="a CSV file of torch's form, which has its own size, or a schedule")],
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    cost: StageCost = None,
) -> None:
    """Say in words what each rank waits for; list every problem of a program that is not valid.

    Other options, such as --virtual-stages 3, go to the schedule's builder.
    """
    from dualpipe_lab.pp.explain import explain as told

    asked = only("explain", name, context)
    check_size(ranks, microbatches, asked)
    program = asked.read(check=False) if isinstance(asked, CsvFile) else asked.build(ranks, microbatches)
    explanation = told(program, read_cost(cost))
    print(explanation)
    if explanation.problems:
        raise typer.Exit(1)


def plan(
    model: Annotated[str, typer.Argument(help="a known model, such as llama3-8b, or a folder with a config.json")],
    gpus: Annotated[int, typer.Option(min=1, help="H100 in all, 8 on a node")],
    memory: Annotated[float, typer.Option(min=0, help="GB that a plan may take of a GPU")] = H100.memory_bytes / 1e9,
    sequence_length: Annotated[int, typer.Option(min=1, help="tokens of a sequence")] = 8192,
    global_batch: Annotated[int, typer.Option(min=1, help="sequences of a step")] = 512,
    count: Annotated[int, typer.Option(min=1, help="plans to print at most")] = 20,
) -> None:
    """List the plans that fit, the fastest first, those within 5% of each other together; seconds are an estimate."""
    if sys.stderr.isatty():
        print(f"comparing the plans of {gpus} GPUs; with a thousand this takes some seconds", file=sys.stderr)
    found = fits(
        model_of(model), gpus, memory * 1e9, sequence_length=sequence_length, global_batch=global_batch, count=count
    )
    if not found:
        raise ValueError(
            f"no plan of {model} on {gpus} GPUs fits into {memory:g} GB each; use more GPUs, or more memory"
        )
    print(found)


def convert(
    source: Annotated[Path, typer.Argument(help="a published folder, or a checkpoint of any plan")],
    target: Annotated[Path, typer.Argument(help="the folder to write, which must not be there yet")],
    to: Annotated[str, typer.Option(help="published (Hugging Face) or checkpoint (of this library)")],
    dtype: Annotated[str | None, typer.Option(help="float64, float32, bfloat16 or float16; default: as it is")] = None,
) -> None:
    """Convert weights between published folders and checkpoints, tensor by tensor, expert by expert.

    Every tensor is checked before one is written; the target appears when it is complete.
    """
    from dualpipe_lab.train import convert as converted

    done = converted(source, target, to, dtype)
    print(f"{done.source} -> {done.target}: {done.num_tensors} tensors, {done.num_bytes:,} bytes")
    print(f"wrote {done.path}")
