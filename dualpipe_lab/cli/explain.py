"""`explain FILE.csv`: whether a program is valid, and what is wrong or what each rank waits for."""

from pathlib import Path
from typing import Annotated

import typer

from dualpipe_lab.pp.problems import InvalidProgram
from dualpipe_lab.pp.torch_csv import from_torch_csv
from dualpipe_lab.pp.validator import validate


def explain(file: Annotated[Path, typer.Argument(help="a program as torch writes it, one row per rank")]) -> None:
    """Check a program from a CSV file and say in words what is wrong with it."""
    program = from_torch_csv(file, check=False)
    try:
        validate(program)
    except InvalidProgram as problems:
        print(problems)
        raise typer.Exit(1) from None
    size = f"{program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches"
    print(f"{program.name}: {size}; every action is there once, in order, and no rank waits for itself")
