"""`convert SOURCE TARGET --to FORM`: weights of one form into another, tensor by tensor."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="a published folder, or a checkpoint, of any plan or of torch")],
    target: Annotated[Path, typer.Argument(help="the folder to write, which must not be there yet")],
    to: Annotated[str, typer.Option(help="published (Hugging Face), checkpoint (of this library) or torch (DCP)")],
    dtype: Annotated[str | None, typer.Option(help="float64, float32, bfloat16 or float16; default: as it is")] = None,
) -> None:
    """Convert weights between published folders and checkpoints, also of torch, tensor by tensor, expert by expert.

    Every tensor is checked before one is written; the target appears when it is complete.
    """
    from dualpipe_lab.train import convert as converted

    done = converted(source, target, to, dtype)
    print(f"{done.source} -> {done.target}: {done.num_tensors} tensors, {done.num_bytes:,} bytes")
    print(f"wrote {done.path}")
