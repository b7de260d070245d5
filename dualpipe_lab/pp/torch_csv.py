"""A program as the CSV that `torch.distributed.pipelining` loads, and back.

Chapter: book/pp/gpipe.  In, out: a `Program`; CSV text, one row per rank, no header, an empty cell for an idle slot.
  compute_only    F, B, I, W and pairs; torch adds its sends and receives when it loads the file
  compute_comms   sends and receives too, as `lower` places them, and REDUCE_GRAD after the last gradient of each stage:
                  torch 2.13 divides the summed gradients by M there, and nowhere else
Reading is stricter than torch 2.13's, which accepts trailing characters, a second F or B of a microbatch, a microbatch
out of range and a missing receive.  REDUCE_GRAD, the waits of torch 2.15, and FSDP's UNSHARD and RESHARD are not
actions of a program; reading skips them.
To run a file: `schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss)`, then
`schedule._load_csv(path, format=form)`; both names are private in torch 2.13.
Torch keeps each stage on one rank, so DualPipe, which keeps it on two, cannot be expressed there; DualPipeV can.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from dualpipe_lab.pp.lowering import lower, strip
from dualpipe_lab.pp.program import SEND_B, SEND_F, B, I, Overlap, Program, ProgramStep, W, actions_of, parse_action
from dualpipe_lab.pp.validation.validator import validate

Form: TypeAlias = Literal["compute_only", "compute_comms"]

_NO_STEP = re.compile(r"[0-9]+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB][0-9]+)")


def to_torch_csv(program: Program, form: Form = "compute_only", waits: bool = False) -> str:
    """Return the CSV text of a valid program.

    `waits`: the form compute_comms says when a send and a reduction are waited for, which torch asks for from 2.15 on
    and does not know before: an activation's send after the backward of its microbatch, a gradient's at the end.

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
    text = io.StringIO()
    with_comms = (_with_reduction(steps, waits) for steps in lower(program).ranks)
    csv.writer(text, lineterminator="\n").writerows(strip(program).ranks if form == "compute_only" else with_comms)
    return text.getvalue()


def _with_reduction(steps: Sequence[ProgramStep], waits: bool) -> list[str]:
    """Write a rank's steps, REDUCE_GRAD after the last B or W of each of its stages, and what waits if it is asked."""
    last = {one.stage: place for place, step in enumerate(steps) for one in actions_of(step) if one.kind in (B, W)}
    row, pending = [], dict[tuple[str, int, int], str]()
    for position, step in enumerate(steps):
        row.append(str(step))
        for kind, stage, microbatch in [(one.kind, one.stage, one.microbatch) for one in actions_of(step)]:
            if waits and kind in (SEND_F, SEND_B):
                pending[kind, stage, microbatch] = f"{stage}WAIT_{kind}{microbatch}"
            if kind in (B, I) and (SEND_F, stage, microbatch) in pending:
                row.append(pending.pop((SEND_F, stage, microbatch)))
            if last.get(stage) == position and kind in (B, W):
                row += [f"{stage}REDUCE_GRAD", *[f"{stage}WAIT_REDUCE_GRAD"] * waits]
    return [*row, *pending.values()]


def from_torch_csv(source: str | Path, name: str | None = None, check: bool = True) -> Program:
    r"""Read a program from CSV text or, given a `Path`, from a file; with sends and receives if it has any.

    `name`: the program's title (default: the file's name).  `check`: also validate the program.  Windows line ends and
    a byte order mark are accepted.  Raises ValueError with row, cell and token for a cell that is not an action, and
    InvalidProgram as `validate`.

    >>> print(from_torch_csv("0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n", name="mine"))
    # mine: 2 ranks, 2 stages, 2 microbatches
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1F1 1B0 1B1
    """
    if isinstance(source, Path):
        name, source = name or source.stem, _read(source)
    elif source.strip().lower().endswith(".csv"):
        raise ValueError(f"from_torch_csv reads text, got the name of a file; give Path({source.strip()!r})")
    text = io.StringIO(source.removeprefix("\ufeff").rstrip(), newline="")
    try:
        rows = [_parse_row(number, cells) for number, cells in enumerate(csv.reader(text), 1)]
    except csv.Error as error:
        raise ValueError(
            f"this is not CSV ({error}); write one row per rank, with commas between its actions"
        ) from None
    program = Program(name or "CSV", rows, num_directions=1)
    return validate(program) if check else program


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8; export the table as CSV") from None


def _parse_row(number: int, cells: list[str]) -> list[ProgramStep]:
    steps = []
    for place, cell in enumerate(cells, 1):
        token = re.sub(r"\s*([(;)])\s*", r"\1", cell.strip())  # torch allows spaces inside a pair
        if token and not _NO_STEP.fullmatch(token):
            try:
                steps.append(parse_action(token))
            except ValueError as error:
                raise ValueError(f"row {number} (rank {number - 1}), cell {place}: {error}") from None
    return steps


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
