"""Export: a program as the CSV that `torch.distributed.pipelining` loads.

Chapter: book/pp/gpipe.  In: a `Program`.  Out: CSV text, one row per rank, no header.
  compute_only    F, B, I, W and pairs; torch adds its own sends and receives when it loads the file
  compute_comms   sends and receives too, as `lower` places them
How to run it: `schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss)`, then
`schedule._load_csv(path, format=form)`; both names are private in torch 2.13.
Torch keeps each stage on one rank, so DualPipe, which keeps it on two, cannot be expressed there; DualPipeV can.
"""

import csv
import io
from typing import Literal, TypeAlias

from dualpipe_lab.pp.lowering import lower, strip
from dualpipe_lab.pp.program import B, Overlap, Program
from dualpipe_lab.pp.validator import validate

Form: TypeAlias = Literal["compute_only", "compute_comms"]


def to_torch_csv(program: Program, form: Form = "compute_only") -> str:
    """Return the CSV text of a valid program.

    Raises InvalidProgram for an invalid program, and ValueError for one that torch cannot express: a stage on two
    ranks, or an overlapped pair whose backward is split.

    >>> from dualpipe_lab.pp.schedules import gpipe
    >>> print(to_torch_csv(gpipe(2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    """
    if form not in ("compute_only", "compute_comms"):
        raise ValueError(f"there is no CSV form {form!r}; use 'compute_only' or 'compute_comms'")
    validate(program)
    _check_expressible(program)
    wanted = strip(program) if form == "compute_only" else lower(program)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(wanted.ranks)
    return text.getvalue()


def _check_expressible(program: Program) -> None:
    home: dict[int, int] = {}
    for (stage, _), rank in program.placement.items():
        if home.setdefault(stage, rank) != rank:
            raise ValueError(
                f"torch keeps a stage on one rank, but {program.name!r} has stage {stage} on ranks {home[stage]} and "
                f"{rank}; export a schedule with one rank per stage, such as DualPipeV"
            )
    for steps in program.ranks:
        for step in steps:
            if isinstance(step, Overlap) and step.backward.kind != B:
                raise ValueError(f"torch overlaps a forward with a whole backward only, not {step}; use B in the pair")
