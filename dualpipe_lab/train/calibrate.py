"""`calibrate`: measure the machine that is here, and write it as a cluster that the planner reads.

In: a number of ranks, seconds.  Out: a `Calibration`: a `Cluster`, and every measured number beside the predicted one.
  measured   matrix products by size and precision, sums of vectors, messages between two ranks
  held out   products of other shapes, vectors and messages of other sizes, all-reduces, full layers
The seconds of a rank with one thread on a CPU are those of its own processor; other programs disturb messages alone.
A CPU's rank is its threads, and its memory is its share of the machine's.
Elsewhere: SimuMax's and vTrain's profiles of a GPU; calculon's systems, which are given.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from dualpipe_lab.plan.efficiency import is_number
from dualpipe_lab.plan.fields import PRECISIONS
from dualpipe_lab.train.calibration import Calibration, Machine, Work
from dualpipe_lab.train.calibration_work import measure
from dualpipe_lab.world.cluster.environment import cluster
from dualpipe_lab.world.launcher import MAX_RANKS, launch
from dualpipe_lab.world.operating_system import host_memory_bytes, processor_name

_LEAST_SECONDS, _MOST_SECONDS = 1.0, 3600.0


def calibrate(
    num_ranks: int = 2,
    seconds: float = 20.0,
    precisions: Sequence[str] = ("float32", "bfloat16"),
    threads: int = 1,
    backend: str = "gloo",
    file: str | Path | None = None,
) -> Calibration:
    """Measure products, memory and messages on ranks of this machine, and fit a cluster to them.

    Args:
        num_ranks: which compute at the same time; the cluster has as many.  One rank sends no message: its link is
            assumed.
        seconds: about how long it takes; each piece of work is measured at least three times, however long that is.
        precisions: types of numbers, of `plan.PRECISIONS`; the layers have the first one.
        threads: of each rank's products.
        backend: `gloo`, or `nccl` where every rank has a GPU.
        file: to which the cluster is written, for `Cluster.from_file`.

    Returns:
        The cluster, and a table of measured beside predicted seconds with the residuals; `print` shows it.

    Raises:
        ValueError: no rank or more than 128, seconds outside of 1 to 3600, an unknown precision, or a file in a folder
            that does not exist, all before a process starts.
        RankError, RankTimeout: as `launch`.
    """
    __tracebackhide__ = True
    _check(num_ranks, seconds, precisions)
    _check_file(file)
    settings = tuple(precisions), float(seconds), time.time()
    found = launch(measure, num_ranks, *settings, threads=threads, backend=backend, timeout=60 + 4 * seconds)
    times = [one.seconds for one in found]
    machine = Machine(
        found[0].gpu or processor_name(),
        found[0].gpu_bytes or host_memory_bytes() // num_ranks,
        num_ranks,
        f"{'NCCL' if backend == 'nccl' else 'GLOO'} within one machine",
        time.strftime("%Y-%m"),
    )
    num_rounds, processor = len(next(iter(times[0].values()))), min(one.processor for one in found)
    result = Calibration.of(_medians(times), machine, num_rounds, processor)
    started = cluster()
    if file is not None and (started is None or started.rank == 0):
        result.cluster.to_file(file)
    return result


def _medians(times: Sequence[dict[Work, list[float]]]) -> dict[Work, float]:
    """Return the median over rounds and ranks of the work that all ranks have measured; a message's on rank 0.

    The largest of a kind is fitted, so that what is held out lies between sizes that are.
    """
    common = [work for work in times[0] if all(work in one for one in times)]
    ranks = {work: times[:1] if work.kind == "message" else times for work in common}
    found = {work: median(value for one in ranks[work] for value in one[work]) for work in common}
    last = {(work.kind, work.precision): work for work in common if work.kind not in ("layer", "all-reduce")}
    return {replace(work, held_out=False) if work in last.values() else work: found[work] for work in common}


def _check(num_ranks: int, seconds: float, precisions: Sequence[str]) -> None:
    if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(
            f"calibrate starts 1 to {MAX_RANKS} ranks, got num_ranks={num_ranks!r}; use 2, which send messages"
        )
    if not is_number(seconds) or not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise ValueError(f"calibrate takes 1 to 3600 seconds, got seconds={seconds!r}; use 20")
    known = ", ".join(PRECISIONS)
    if isinstance(precisions, str) or not isinstance(precisions, Sequence) or not precisions:
        raise ValueError(f"calibrate needs a list of precisions, got {precisions!r}; such as ('float32',)")
    wrong = [name for name in precisions if name not in PRECISIONS]
    if wrong or len(set(precisions)) < len(precisions):
        raise ValueError(f"calibrate measures each of {known} at most once, got {', '.join(map(str, precisions))}")


def _check_file(file: str | Path | None) -> None:
    if file is None:
        return
    if not isinstance(file, str | Path) or not str(file):
        raise ValueError(f"calibrate writes to a path, got file={file!r}; such as 'machine.json'")
    path = Path(file)
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise ValueError(f"calibrate writes one file, and {path} {problem}; give the name of a file in one that exists")
