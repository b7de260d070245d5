"""`explain FILE.csv`: what each rank waits for, in words, and what is wrong with a program that cannot run."""

from typing import Annotated

import typer

from dualpipe_lab.cli.inputs import CsvFile, Microbatches, Ranks, StageCost, read_cost, split, wanted


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

    names, options = split([name, *context.args])
    if len(names) != 1:
        raise ValueError(f"explain takes one program, got {len(names)}: {' '.join(names)}")
    asked = wanted(names[0]).with_options(options)
    program = asked.read(check=False) if isinstance(asked, CsvFile) else asked.build(ranks, microbatches)
    explanation = told(program, read_cost(cost))
    print(explanation)
    if explanation.problems:
        raise typer.Exit(1)
