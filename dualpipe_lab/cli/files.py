"""The files of `show` and `optimise`: pictures, a page, torch's CSV, a trace."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from dualpipe_lab.cli.inputs import whole_ticks
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.torch_csv import to_torch_csv
from dualpipe_lab.timeline import Timeline

Svg: TypeAlias = Annotated[Path | None, typer.Option(help="write the picture")]
Png: TypeAlias = Annotated[Path | None, typer.Option(help="write the picture as pixels")]
Html: TypeAlias = Annotated[Path | None, typer.Option(help="write a page that plays and recomputes")]
Csv: TypeAlias = Annotated[Path | None, typer.Option(help="write the program for torch.distributed.pipelining")]
Perfetto: TypeAlias = Annotated[Path | None, typer.Option(help="write a trace for ui.perfetto.dev")]

_NO_TERMINAL = (100, 24)


def write(files: Mapping[str, Path | None], program: Program, cost: Cost) -> None:
    """Write the program in every form that has a path, and print each path."""
    for form, path in files.items():
        if path is not None:
            path.write_bytes(_export(form, program, cost))
            print(f"wrote {path} ({path.stat().st_size:,} bytes)")


def columns() -> int:
    """Return the width of the terminal in columns."""
    return shutil.get_terminal_size(_NO_TERMINAL).columns


def _export(form: str, program: Program, cost: Cost) -> bytes:
    if form == "csv":
        return to_torch_csv(program).encode()
    if form == "html":
        return _page(program, cost).encode()
    timeline = simulate(program, cost)
    if form == "png":
        from dualpipe_lab.viz.plots import timeline_png

        return timeline_png(timeline)
    return (timeline.to_svg() if form == "svg" else timeline.to_perfetto()).encode()


def _page(program: Program, cost: Cost) -> str:
    """Return a page; its sliders need integer ticks, so fractional costs are converted to finer ticks."""
    from dualpipe_lab.viz.embed import page, timeline_html

    ticks, fine = whole_ticks(cost)
    title = program.name if fine == 1 else f"{program.name}, ticks of 1/{fine}"
    recosted = simulate(program, ticks)
    named = Timeline(title, recosted.spans_by_rank, recosted.messages, costs=recosted.costs)
    return page(timeline_html(named), program.name)
