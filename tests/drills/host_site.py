"""Two hosts and a spare, agents on them, and a training that nobody disturbs: what drills of trainings share."""

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from torchrun_cases.agents import Agents  # noqa: E402

from dualpipe_lab.dp.checkpoint import Checkpoint, CheckpointError, saved_steps  # noqa: E402
from dualpipe_lab.train.metrics import read_csv  # noqa: E402
from dualpipe_lab.train.result import read_weights  # noqa: E402
from dualpipe_lab.world.emulate import hosts  # noqa: E402
from dualpipe_lab.world.folder import PREFIX  # noqa: E402

STEPS, RANKS = 6, 4
PATIENCE = 150.0  # seconds for what takes a few where nothing else runs


class Site:
    """Three hosts, of which one is a spare, agents, and a training that nobody disturbs.

    Args:
        folder: for all files.
        first_port: of the rendezvous; two sites on the same hosts have different ones.
        made: hosts to use; by default, new ones.
        options: of the trainings, beside those of `torchrun_cases.trainings`.
    """

    def __init__(self, folder, first_port=29_400, made=None, options=None):
        self.folder, self.options, self._number = Path(folder), options or {}, 0
        self._stack = ExitStack()
        self.hosts = made or self._stack.enter_context(hosts.network(3))
        (self.folder / "tmp").mkdir(parents=True)
        self.agents = Agents(self.folder / "tmp", first_port)
        self._stack.callback(self.agents.close)
        self.reference = self.job("reference", counts=True, options=self.options | {"keep": STEPS})
        outcome = self.agents.run("training", hosts=self.hosts[:2], ranks_per_host=2, job=self.reference)
        assert outcome.codes == [0, 0], outcome.text
        saved = Path(self.reference["folder"])
        self.weights = {step: read_weights(saved / f"step-{step:08d}") for step in saved_steps(saved)}
        self.losses = losses(saved)
        self.calls = {rank: counted(self.reference, rank) for rank in range(RANKS)}

    def close(self):
        """Remove hosts and agents."""
        self._stack.close()

    def job(self, name, blow=None, counts=False, start=0, options=None, **more):
        """What the ranks of one start are told."""
        notes = self.folder / name / "notes"
        notes.mkdir(parents=True, exist_ok=True)
        return {
            "folder": str(self.folder / name / "saved"), "notes": str(notes), "plan": {}, "blow": blow,
            "counts": counts, "start": start, "options": self.options if options is None else options, **more,
        }  # fmt: skip

    def begin(self, case, name, **options):
        """Start a training that is hit; return its job."""
        calls = 1 + int(case.share * self.calls[case.rank][case.phase, case.count])
        blow = {"victim": case.victim, "rank": case.rank, "phase": case.phase, "count": case.count, "calls": calls}
        job = self.job(name, blow)
        arguments = {"restarts": int(case.goes_on == "restart")} | options
        self.agents.begin(
            "training", hosts=self.hosts[:2], ranks_per_host=2, patience=3 * PATIENCE, job=job, **arguments
        )
        return job

    def resume(self, job, on, **options):
        """Start a training again on these hosts, until its end; return the outcome."""
        again = job | {"blow": None, "start": job["start"] + 1}
        return self.agents.run("training", hosts=on, ranks_per_host=2, job=again, patience=PATIENCE, **options)

    def broken(self, folder):
        """The visible checkpoints that cannot be read, or whose weights are not those of the undisturbed training."""
        found = []
        for step in saved_steps(folder):
            path = Path(folder) / f"step-{step:08d}"
            try:
                Checkpoint(path).verify()
                if distance(read_weights(path), self.weights[step]):
                    found.append(f"{path.name} has other weights")
            except CheckpointError as error:
                found.append(str(error))
        return found

    def left_over(self, on):
        """What processes, now ended, have left on these hosts."""
        found = [f"process {pid}" for host in on for pid in host.pids()]
        for host in on:
            sockets = host.run("ss", "-tanH").splitlines()
            found += [f"socket {line}" for line in sockets if line.split()[0] in ("LISTEN", "ESTAB")]
        folders = [path for host in on for path in (self.folder / "tmp" / host.name).glob(f"{PREFIX}*")]
        return found + [f"folder {path.name}" for path in folders]


def losses(folder):
    """The curve that was written beside a folder of checkpoints."""
    return [float(row["loss"]) for row in read_csv(f"{folder}-curve.csv")]


def counted(job, rank):
    """The calls of each phase of a rank that counted them."""
    lines = [line.split() for line in Path(job["notes"], f"0-0-{rank}").read_text().splitlines()]
    following = itertools.pairwise(lines)
    return {(name, int(count)): int(calls) for (_, name, count, _), (*_, calls) in following}


def distance(found, right):
    """The largest difference of weights, relative to the largest weight."""
    assert found.keys() == right.keys()
    largest = max(float(tensor.abs().max()) for tensor in right.values())
    return max(float((found[name] - tensor).abs().max()) for name, tensor in right.items()) / largest
