"""The grid of programs on which the page's numbers have to equal the library's."""

import json
from pathlib import Path

from dualpipe_lab import Cost, Program, schedules, simulate

HERE = Path(__file__).parent
ORACLES = json.loads((HERE.parent / "oracles" / "programs.json").read_text())
COSTS = (
    Cost(),
    Cost(F=2, I=3, W=1, overlap=4, latency=1, transfer=2),
    Cost(F=3, I=2, W=2, B=5, latency=7),
    Cost(F=1, I=1, W=1, transfer=3),
    Cost(F=0, I=1, W=0),
    Cost(F=1_234_567, I=2_345_678, W=987_654, latency=1_000_003, transfer=250_001),
)


def programs():
    """Schedules of several sizes, lowered or not, and the three programs of the oracles."""
    for name in schedules.names():
        for num_ranks, num_microbatches in ((1, 1), (2, 3), (4, 2), (3, 7), (8, 20)):
            try:
                yield schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
            except ValueError:
                continue  # sizes that this schedule does not have
    for name, rows in ORACLES.items():
        if name != "legend":
            yield Program.parse(name, rows)


def timelines():
    """The grid: every program with every cost, and costs that differ between the stages."""
    for program in programs():
        for cost in COSTS:
            yield simulate(program, cost)
        stages = range(program.num_stages)
        yield simulate(program, Cost(F=[1 + s % 3 for s in stages], I=[2 + s % 2 for s in stages], W=1, latency=1))
        yield simulate(program, Cost(overlap=lambda pair: 2 + pair.forward.microbatch % 3, transfer=1))


def numbers(timeline):
    """The library's numbers of a timeline, in the form in which the page gives them."""
    places = {id(span): place for place, span in enumerate(span for row in timeline.spans_by_rank for span in row)}
    ranks = range(timeline.num_ranks)
    return {
        "spans": [[s.rank, s.start, s.end, list(map(list, s.actions))] for row in timeline.spans_by_rank for s in row],
        "messages": sorted(
            [m.src, m.dst, m.sent, m.sent if m.left is None else m.left, m.arrived, m.label] for m in timeline.messages
        ),
        "makespan": timeline.makespan,
        "busy": [timeline.busy_time(rank) for rank in ranks],
        "peak": [timeline.peak_activations(rank) for rank in ranks],
        "live": [[list(entry) for entry in timeline.live_activations(rank)] for rank in ranks],
        "path": [places[id(span)] for span in timeline.critical_path()],
    }


def same(page):
    """The page's numbers with what has no order sorted, and steps that change nothing left out."""
    live = [[e for i, e in enumerate(steps) if i == 0 or e[1] != steps[i - 1][1]] for steps in page["live"]]
    return {**page, "messages": sorted(page["messages"]), "live": live}
