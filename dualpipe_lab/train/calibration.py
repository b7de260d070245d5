"""`Calibration`: what a machine's numbers are, and how well they predict what they were not fitted to.

In: the seconds of pieces of work, as measured.  Out: a `Cluster`, and a table of measured beside predicted seconds.
  product, elementwise   `Accelerator.product_seconds` and `elementwise_seconds`
  message                `LinkClass.seconds`
  all-reduce             a ring of n ranks: 2 (n - 1) messages of 1/n of the bytes; never fitted
  layer                  the sum over the kernels that its forward and backward call, one after the other
  error                  predicted / measured - 1; a residual is the median and the worst of the errors' sizes
A kernel that is called alone, over and over, has an overhead; in a layer the program's own work comes on top: Python,
autograd.  The smallest layer tells that part, and the cluster has both together; the larger layers are held out.
Rows that were fitted have an error of almost 0 by construction; the others check it.
Elsewhere: SimuMax's tables of measured and simulated steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.efficiency import Efficiency
from dualpipe_lab.plan.hardware import Accelerator, LinkClass
from dualpipe_lab.train.calibration_fit import fit

Kind: TypeAlias = Literal["product", "elementwise", "message", "all-reduce", "layer"]
KINDS: tuple[Kind, ...] = ("product", "elementwise", "message", "all-reduce", "layer")
Kernel: TypeAlias = tuple[Literal["product", "elementwise"], float, int]  # with its size, and how often it is called

_BUSY = 0.9  # of the time, below which a table says that the machine was busy


@dataclass(frozen=True)
class Work:
    """One piece of work whose seconds are measured.

    Attributes:
        kind: of the work.
        precision: the type of its numbers.
        label: its shape.
        size: FLOPs of a product or of a layer's products, bytes of everything else.
        held_out: whether it tests the fit, instead of being fitted.
        kernels: of a layer, those that it calls.
    """

    kind: Kind
    precision: str
    label: str
    size: float
    held_out: bool = False
    kernels: tuple[Kernel, ...] = ()


class Row(NamedTuple):
    """One line of the table: a piece of work, and its seconds as measured and as predicted."""

    work: Work
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The relative error of the prediction, above 0 where it is too long."""
        return self.predicted / self.measured - 1


class Residual(NamedTuple):
    """The sizes of relative errors: their median, the worst, and of how many rows."""

    median: float
    worst: float
    num_rows: int

    def __str__(self) -> str:
        rows = f"{self.num_rows} row{'s' * (self.num_rows != 1)}"
        return f"median {self.median:.1%}, worst {self.worst:.1%} of {rows}"


class Machine(NamedTuple):
    """What is known of a machine without measuring: a rank's processor and memory, and the number of ranks."""

    name: str
    memory_bytes: int
    num_ranks: int
    link: str
    date: str


@dataclass(frozen=True)
class Calibration:
    """The numbers of a machine, and the table that tests them; it prints as that table.

    Attributes:
        cluster: for the planner: the ranks that were measured, as one node.
        rows: every piece of work, in the order of their kinds and sizes.
        alone: seconds of overhead of a kernel that is called alone, as in the rows of products and elementwise work;
            the cluster's is that of a kernel in a layer.
        num_rounds: how often each was measured; the seconds are medians.
        processor: the part of the time in which the busiest rank had its processor; the rest other programs had.
    """

    cluster: Cluster
    rows: tuple[Row, ...]
    alone: float
    num_rounds: int
    processor: float = 1.0

    @classmethod
    def of(
        cls, seconds: Mapping[Work, float], machine: Machine, num_rounds: int = 1, processor: float = 1.0
    ) -> "Calibration":
        """Fit the numbers of a machine to what was measured on it.

        Args:
            seconds: of every piece of work.
            machine: that was measured.
            num_rounds: how often.
            processor: the part of the time in which the ranks had their processors.

        Raises:
            ValueError: fewer than two sizes of a kind.
        """
        bare = _cluster(seconds, machine)
        cluster = replace(bare, accelerator=_in_layers(seconds, bare))
        order = sorted(seconds, key=lambda work: KINDS.index(work.kind))
        found = [predict(work, cluster if work.kind == "layer" else bare) for work in order]
        rows = tuple(Row(work, seconds[work], value) for work, value in zip(order, found, strict=True))
        return cls(cluster, rows, bare.accelerator.overhead, num_rounds, processor)

    def residual(self, kind: Kind | None = None, held_out: bool = True) -> Residual:
        """Return median and worst error of the rows of a kind, or of all kinds.

        Args:
            kind: of the work (default: all).
            held_out: the rows that test the fit, or those that were fitted.

        Raises:
            ValueError: there is no such row.
        """
        chosen = [row for row in self.rows if row.work.held_out == held_out and kind in (None, row.work.kind)]
        if not chosen:
            wanted = "held out" if held_out else "fitted"
            raise ValueError(f"a calibration has rows of {', '.join(KINDS)}, got no {kind!r} that was {wanted}")
        errors = [abs(row.error) for row in chosen]
        return Residual(median(errors), max(errors), len(errors))

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *_table(self.rows), "", *self._foot()])

    def _head(self) -> Iterator[str]:
        unit, link = self.cluster.accelerator, self.cluster.inside
        yield str(self.cluster)
        yield f"a kernel in a layer {_time(unit.overhead)} on top, alone {_time(self.alone)}"
        yield f"memory {unit.memory_bandwidth / 1e9:.3g} GB/s at best, {unit.memory_efficiency} of that by size"
        for kind in unit.peaks:
            yield f"products in {kind}: {unit.efficiency_of(kind)} of the peak by size"
        yield f"{link.name}: a message {_time(link.latency)}, and {link.bandwidth / 1e9:.3g} GB/s"

    def _foot(self) -> Iterator[str]:
        yield f"medians of {self.num_rounds} rounds; what was fitted: {self.residual(held_out=False)}"
        if self.processor < _BUSY:
            yield f"other programs had {1 - self.processor:.0%} of a rank's processor: messages are slower for that"
        held_out = {row.work.kind for row in self.rows if row.work.held_out}
        for kind in KINDS:
            if kind in held_out:
                yield f"held out, {kind}: {self.residual(kind)}"


def predict(work: Work, cluster: Cluster) -> float:
    """Return the seconds of a piece of work by the numbers of a cluster whose ranks are one node."""
    unit, link, ranks = cluster.accelerator, cluster.inside, cluster.num_ranks
    if work.kind == "product":
        return unit.product_seconds(work.size, work.precision)
    if work.kind == "elementwise":
        return unit.elementwise_seconds(work.size)
    if work.kind == "message":
        return link.seconds(work.size)
    if work.kind == "all-reduce":
        return 2 * (ranks - 1) * link.seconds(work.size / ranks)
    return sum(number * predict(Work(kind, work.precision, "", size), cluster) for kind, size, number in work.kernels)


def _cluster(seconds: Mapping[Work, float], machine: Machine) -> Cluster:
    source = f"measured by train.calibrate on {machine.num_ranks} ranks at once"
    unit = _accelerator(seconds, machine, source)
    inside = _link(_sizes(seconds, "message"), machine.link, unit, source)
    between = replace(inside, name=f"{inside.name}, as inside", source="not measured: one node")
    return Cluster(unit, machine.num_ranks, machine.num_ranks, inside, between)


def _link(seconds: dict[float, float], name: str, unit: Accelerator, source: str) -> LinkClass:
    """Return the link of a machine; one rank sends no message, and its memory stands for the link."""
    if not seconds:
        return LinkClass(f"memory of {unit.name}", unit.memory_bandwidth, 0.0, "assumed: one rank sends no message")
    found = fit(seconds)
    curve = Efficiency(origin="measured", points=found.points, source=source)
    return LinkClass(name, found.rate, found.overhead, source, curve)


def _accelerator(seconds: Mapping[Work, float], machine: Machine, source: str) -> Accelerator:
    precisions = list(dict.fromkeys(work.precision for work in seconds if work.kind == "product"))
    if not precisions:
        raise ValueError("a calibration needs matrix products of two sizes or more, got none; measure some")
    moved = _sizes(seconds, "elementwise")
    overhead = min(fit(sizes).overhead for sizes in (_sizes(seconds, "product", precisions[0]), moved))
    products = {kind: fit(_sizes(seconds, "product", kind), overhead) for kind in precisions}
    memory = fit(moved, overhead)
    curves = {kind: Efficiency(origin="measured", points=one.points, source=source) for kind, one in products.items()}
    return Accelerator(
        machine.name,
        {kind: one.rate for kind, one in products.items()},
        machine.memory_bytes,
        memory.rate,
        source,
        machine.date,
        curves.pop(precisions[0]),
        overhead,
        Efficiency(origin="measured", points=memory.points, source=source),
        curves,
    )


def _in_layers(seconds: Mapping[Work, float], bare: Cluster) -> Accelerator:
    """Return the accelerator with the overhead that its kernels have in the layers that are not held out."""
    layers = [work for work in seconds if work.kind == "layer" and not work.held_out]
    number = sum(number for work in layers for _, _, number in work.kernels)
    rest = sum(seconds[work] - predict(work, bare) for work in layers)
    more = max(0.0, rest / number) if number else 0.0
    return replace(bare.accelerator, overhead=bare.accelerator.overhead + more)


def _sizes(seconds: Mapping[Work, float], kind: Kind, precision: str | None = None) -> dict[float, float]:
    """Return the seconds by size of what is fitted."""
    return {
        work.size: value
        for work, value in seconds.items()
        if work.kind == kind and not work.held_out and precision in (None, work.precision)
    }


def _table(rows: tuple[Row, ...]) -> list[str]:
    cells: list[tuple[str, ...]] = [("work", "numbers", "shape", "size", "measured", "predicted", "error", "")]
    for work, measured, predicted in rows:
        size = f"{work.size:.3g} {'FLOP' if work.kind in ('product', 'layer') else 'B'}"
        error, note = f"{predicted / measured - 1:+.1%}", "held out" if work.held_out else "fitted"
        cells.append((work.kind, work.precision, work.label, size, _time(measured), _time(predicted), error, note))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
