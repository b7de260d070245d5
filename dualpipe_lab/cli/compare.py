"""`compare NAME NAME ...`: ranks schedules with equal costs of a rank's share."""

from dataclasses import replace
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from dualpipe_lab.cli.inputs import (
    CsvFile,
    Memory,
    Microbatches,
    Options,
    Ranks,
    ShareCost,
    check_size,
    costs_of,
    flag_of,
    read_cost,
    split,
    wanted,
    words_of,
)
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.ranking import Score, ranked, score
from dualpipe_lab.pp.schedules.variants import Variant
from dualpipe_lab.timeline.units import number

Asked: TypeAlias = Variant | CsvFile

_COLUMNS = ("", "schedule", "makespan", "bubble", "window", "local", "activations", "weights", "pairs", "messages")
_WIDTH = 120


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
    asked = _with_options(
        [wanted(name) for name in given or schedules.names(synchronous=True, pairs=may_pair)], options
    )
    check_size(ranks, microbatches, *asked)
    scores, refused = _scores(asked, (ranks, microbatches), costs)
    console = Console(width=_WIDTH if not Console().is_terminal else None)
    print(f"{ranks} ranks, {microbatches} microbatches; a rank's share of the model costs {words_of(costs_of(costs))}")
    print(f"overlapped pairs: {'for all that have them' if may_pair else 'none, a pair takes F and then B'}")
    if scores:
        console.print(_table(ranked(scores, memory, barrier), memory))
    for name, reason in refused:
        print(f"{name}: {reason}")
    for one in asked:
        if may_pair and isinstance(one, Variant) and (twin := schedules.twin_of(one.name)):
            print(f"{one}: it has no pairs; {twin} has")
        if isinstance(one, Variant) and not schedules.is_synchronous(one.name):
            print(
                f"{one}: it updates the weights between microbatches, so it computes another gradient than the others"
            )
    if not scores:
        raise ValueError("none of these schedules has this size")


def _with_options(asked: list[Asked], options: Options) -> list[Asked]:
    """Apply each option to the schedules that define it; ValueError for an option of none."""
    for option in options:
        if not any(one.has(option) for one in asked):
            raise ValueError(f"none of these schedules has the option {flag_of(option)}")
    return [one.with_options({key: value for key, value in options.items() if one.has(key)}) for one in asked]


def _scores(asked: list[Asked], size: tuple[int, int], cost: Cost) -> tuple[list[Score], list[tuple[str, str]]]:
    """Return the scores of the schedules that support the size, and the reasons of the others."""
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
        counts = (number(one.weights), str(one.pairs), str(one.messages))
        sizes = (number(one.peak) + ("" if fits else " > limit"), *counts)
        numbers = (number(one.makespan), f"{one.bubble:.1%}", number(one.window), number(one.local_bubble), *sizes)
        table.add_row(str(place) if fits else "-", one.name, *numbers, style=None if fits else "dim")
    return table
