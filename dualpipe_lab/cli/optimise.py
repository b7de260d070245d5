"""`optimise`: searches for a faster order than those of the fixed schedules, under a memory limit."""

from typing import Annotated

import typer

from dualpipe_lab.cli.files import Csv, Html, Perfetto, Png, Svg, columns, write
from dualpipe_lab.cli.inputs import Memory, Microbatches, Ranks, ShareCost, check_size, read_cost, wanted
from dualpipe_lab.pp.optimise import search
from dualpipe_lab.pp.ranking import stage_cost
from dualpipe_lab.pp.simulator import simulate

MAX_SEARCHED = 2**11  # ranks x microbatches: every move is a simulation


def optimise(
    names: Annotated[list[str] | None, typer.Argument(help="schedules to start from; none: all")] = None,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    cost: ShareCost = None,
    memory: Memory = None,
    weights: Annotated[int | None, typer.Option(min=1, help="weights that a rank has room for, in shares")] = None,
    moves: Annotated[int, typer.Option(min=0, max=100_000, help="local moves to try, per placement of stages")] = 300,
    seed: Annotated[int, typer.Option(help="of the moves; the same seed gives the same order")] = 0,
    svg: Svg = None,
    png: Png = None,
    html: Html = None,
    csv: Csv = None,
    perfetto: Perfetto = None,
) -> None:
    """Search for a quicker order, and say how far it is from a lower bound; print it, or write it to files."""
    costs = read_cost(cost)
    check_size(ranks, microbatches, *map(wanted, names or ["gpipe"]), most=MAX_SEARCHED)
    found = search(ranks, microbatches, costs, memory, weights, names or None, seed, moves)
    per_stage = stage_cost(found.program, costs)
    print(found)
    files = {"svg": svg, "png": png, "html": html, "csv": csv, "perfetto": perfetto}
    if not any(files.values()):
        print(f"\n{simulate(found.program, per_stage).to_text(columns())}")
    write(files, found.program, per_stage)
