"""`traces FOLDER`: the trace files of all ranks of a run, from all hosts, as one timeline."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dualpipe_lab.cli.files import Html, Perfetto, Svg, columns
from dualpipe_lab.timeline import Timeline


def traces(
    folder: Annotated[
        Path, typer.Argument(help="a run's folder, or the folder of all runs, of which the last is read")
    ],
    step: Annotated[list[int] | None, typer.Option(help="a step to take; again for more (default: all)")] = None,
    svg: Svg = None,
    html: Html = None,
    perfetto: Perfetto = None,
    values: Annotated[Path | None, typer.Option("--json", help="write what Timeline.from_dict reads")] = None,
) -> None:
    """Merge the trace files of all ranks: say what is there, and print the timeline or write it to files.

    Copy the files of hosts that share no folder into one folder first.
    """
    from dualpipe_lab.launch.record.trace_files import read_traces  # imports torch's neighbours

    found = read_traces(folder)
    print(found)
    timeline = found.timeline(step)
    files = {"svg": svg, "html": html, "perfetto": perfetto, "json": values}
    if not any(files.values()):
        print(timeline.to_text(columns()))
    for form, path in files.items():
        if path is not None:
            path.write_bytes(_export(form, timeline).encode())
            print(f"wrote {path} ({path.stat().st_size:,} bytes)")


def _export(form: str, timeline: Timeline) -> str:
    if form == "html":
        from dualpipe_lab.viz.embed import page, timeline_html

        return page(timeline_html(timeline), timeline.name)
    if form == "json":
        return json.dumps(timeline.to_dict())
    return timeline.to_svg() if form == "svg" else timeline.to_perfetto()
