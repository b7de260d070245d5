"""`explain FILE.csv`: the waits of each rank in words, and the problems of an invalid program."""

from typing import Annotated

import typer

from dualpipe_lab.cli.inputs import CsvFile, Microbatches, Ranks, StageCost, check_size, only, read_cost


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
