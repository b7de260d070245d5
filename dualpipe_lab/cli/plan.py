"""`plan MODEL`: the cuts of a model over so many GPUs that fit, with memory and a range of seconds."""

from typing import Annotated

import typer

from dualpipe_lab.plan.fits import fits
from dualpipe_lab.plan.hardware import H100
from dualpipe_lab.plan.model_of import model_of


def plan(
    model: Annotated[str, typer.Argument(help="a known model, such as llama3-8b, or a folder with a config.json")],
    gpus: Annotated[int, typer.Option(min=1, help="H100 in all, 8 on a node")],
    memory: Annotated[float, typer.Option(min=0, help="GB that a plan may take of a GPU")] = H100.memory_bytes / 1e9,
    sequence_length: Annotated[int, typer.Option(min=1, help="tokens of a sequence")] = 8192,
    global_batch: Annotated[int, typer.Option(min=1, help="sequences of a step")] = 512,
    count: Annotated[int, typer.Option(min=1, help="plans to print at most")] = 20,
) -> None:
    """List the plans that fit, the fastest first, those within 5% of each other together; seconds are an estimate."""
    found = fits(
        model_of(model), gpus, memory * 1e9, sequence_length=sequence_length, global_batch=global_batch, count=count
    )
    if not found:
        raise ValueError(
            f"no plan of {model} on {gpus} GPUs fits into {memory:g} GB each; use more GPUs, or more memory"
        )
    print(found)
