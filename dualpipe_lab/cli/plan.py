"""`plan MODEL`: the fastest cuts of a model over a cluster that fit, their memory, and why others lost."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import typer

from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.model_of import model_of
from dualpipe_lab.plan.planner import search
from dualpipe_lab.plan.search_result import Choice, SearchResult

_GB, _WIDTH = 10**9, 40
_CAUTION = "Seconds are assumed: MLPerf's steps of Llama 3.1 405B took 1.4 to 1.7 times what is estimated for them."
_REMEDY = "Efficiencies that `train.calibrate` measured on your machine come in by --cluster."
_LETTERS = {  # of the bars, in the order of the figures
    "parameters": "P", "gradients": "G", "masters": "M", "moments": "V", "activations": "A", "ends": "E",
    "logits": "L", "working": "W", "received": "I", "buffers": "B", "reserve": "R",
}  # fmt: skip
Framework = Literal["lab", "megatron", "torchtitan", "deepspeed"]


def plan(
    model: Annotated[str, typer.Argument(help="a known model, such as llama3-8b, or a folder with a config.json")],
    gpus: Annotated[int, typer.Option(min=1, help="ranks in all")],
    gpu: Annotated[str, typer.Option(help="the accelerator: h100, a100-80, b200, ...")] = "h100",
    nodes_of: Annotated[int | None, typer.Option(min=1, help="ranks of a node (default: what is usual)")] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="a cluster file, such as calibrate writes: of its nodes there are as many as needed"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences of a step")] = 512,
    length: Annotated[int, typer.Option(min=1, help="tokens of a sequence")] = 8192,
    tokens: Annotated[float | None, typer.Option(help="tokens of the run, for hours")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="of one rank's hour")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="a schedule to try; several: again (default: all)")] = None,
    count: Annotated[int, typer.Option(min=1, max=50, help="plans to print")] = 5,
    limit: Annotated[int, typer.Option(min=1, help="plans to compute in full at most")] = 400,
    export: Annotated[Framework | None, typer.Option(help="print the first plan as settings of a framework")] = None,
) -> None:
    """Find the fastest plans that fit, and say why the others lost; every number is an estimate."""
    machine = Cluster.of(gpu, gpus, nodes_of) if cluster is None else _of_file(cluster, gpus, nodes_of)
    config = model_of(model)
    found = search(config, machine, length, batch, count=min(count, limit), schedule_names=schedule, limit=limit)
    if not found.choices:
        raise ValueError(f"no plan fits: {_nearest(found)}")
    if export is not None:
        print(_exported(found.best[0], export))
        return
    caution = f"{_CAUTION}\n{_REMEDY}" if cluster is None else _CAUTION
    print("\n".join(_lines(found, machine, caution, tokens, price)))


def _of_file(path: Path, num_ranks: int, ranks_per_node: int | None) -> Cluster:
    """Return a file's machine with as many ranks as are asked for, in nodes of its size."""
    found = Cluster.from_file(path)
    return replace(found, num_ranks=num_ranks, ranks_per_node=ranks_per_node or min(found.ranks_per_node, num_ranks))


def _lines(
    found: SearchResult, machine: Cluster, caution: str, tokens: float | None, price: float | None
) -> Iterator[str]:
    yield f"{machine}"
    yield f"{found.num_plans} plans, {len(found.choices)} computed in full that fit{_end(found)}"
    yield caution
    yield ""
    for place, choice in enumerate(found.best, 1):
        yield f"{place}. {_row(choice, machine)}"
        yield f"   {choice.plan}"
    first = found.best[0]
    yield from ("", "Memory of the first, by rank of pp:")
    yield from _bars(first, machine)
    yield f"      {_legend(first)}"
    yield from ("", *_time(first))
    if tokens is not None:
        yield _run(first, tokens, price)
    yield from ("", "Why others lost:")
    for constraint, number in sorted(found.counts.items()):
        example = next(lost for lost in found.lost if lost.constraint == constraint)
        yield f"  {number} by {constraint}, such as {example.plan}"
        yield f"      {example.reason}"


def _row(choice: Choice, machine: Cluster) -> str:
    part = choice.bytes / machine.accelerator.memory_bytes
    time = choice.time
    return f"{time.seconds:.3f} s, MFU {time.mfu:.1%}, bubble {time.bubble:.1%}, memory {part:.0%}"


def _end(found: SearchResult) -> str:
    return "" if found.complete else "; the search stopped at its limit, and another plan may be faster"


def _legend(choice: Choice) -> str:
    """Name the letters of the parts that some rank has."""
    figures = (figure for memory in choice.memory.places.values() for figure in memory.figures)
    there = {figure.name for figure in figures if figure.num_bytes}
    return ", ".join(f"{letter} {name}" for name, letter in _LETTERS.items() if name in there)


def _bars(choice: Choice, machine: Cluster) -> Iterator[str]:
    """Yield one bar for each rank of pp: its tp and cp rank that needs most, up to the accelerator's memory."""
    limit = machine.accelerator.memory_bytes
    for pp_rank in range(choice.plan.pp):
        here = [memory for memory in choice.memory.places.values() if memory.pp_rank == pp_rank]
        memory = max(here, key=lambda one: one.allocated)
        sizes = {figure.name: figure.num_bytes for figure in memory.figures}
        bar, total = "", 0
        for name, letter in _LETTERS.items():
            total += sizes[name]
            bar += letter * (round(total / limit * _WIDTH) - len(bar))
        yield f"  {pp_rank:3} |{bar[:_WIDTH]:{_WIDTH}}| {total / _GB:.0f} of {limit / _GB:.0f} GB"


def _time(choice: Choice) -> Iterator[str]:
    time = choice.time
    busiest = max(range(len(time.busy)), key=time.busy.__getitem__)
    spent = sorted(time.spent[busiest].items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in spent if seconds > time.seconds / 1000)
    yield f"Seconds of the busiest rank of pp, {busiest}: {parts}"
    behind = max(time.gradients), max(time.update), time.pipeline - max(time.busy)
    yield "Then: {:.3f} gradients and weights, {:.3f} optimizer; it waits {:.3f} in the pipeline".format(*behind)
    yield f"{time.tokens_per_second:.0f} tokens/s; MFU {time.mfu:.1%} with causal pairs, {time.full_mfu:.1%} with all"


def _run(choice: Choice, tokens: float, price: float | None) -> str:
    hours = choice.time.hours(tokens)
    text = f"{tokens:.3g} tokens take {hours:.0f} hours, {hours * choice.plan.world_size:.3g} of one rank"
    return text if price is None else f"{text}, and cost {choice.time.cost(tokens, price):.3g}"


def _nearest(found: SearchResult) -> str:
    """Return the reason of the plan that came nearest to fitting; one whose states fit came nearer than any other."""
    by_memory = [lost for lost in found.lost if lost.constraint == "memory"] or list(found.lost)
    nearest = min(by_memory, key=lambda lost: (lost.is_states, lost.num_bytes or inf))
    return f"{nearest.plan}: {nearest.reason}; use more ranks, or ones with more memory"


def _exported(choice: Choice, framework: Framework) -> str:
    from dualpipe_lab.plan import exports

    if framework == "lab":
        return str(exports.lab(choice.plan))
    settings = {"megatron": exports.megatron, "torchtitan": exports.torchtitan, "deepspeed": exports.deepspeed}
    memory = choice.memory
    return str(settings[framework](choice.plan, memory.model, memory.sequence_length, memory.global_batch))
