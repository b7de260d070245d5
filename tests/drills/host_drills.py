"""Trainings on two hosts that are hit: how many are explained, after how long, and what the resumed ones end with.

Two network namespaces with two ranks each, under torchrun's agents, train and save into one folder, as on a cluster's
shared file system.  A rank, an agent, a host (link down, then every process killed) or the host of the rendezvous is
killed in a phase that the ranks announce themselves (`torchrun_cases.trainings`), at a call drawn inside of it.

  explained   each living host names the cause; `through`: every living rank had ended its training before
  left over   on living hosts: processes, sockets that listen or are connected, folders; hidden parts of checkpoints
  whole       whatever checkpoint is visible can be read, and has the weights of the undisturbed training at its step
  resumed     by torchrun (a rank), by a new start on both hosts (an agent), on a fresh host in the place of the dead
              one, or on the one that is left
  equal       last weights: bit by bit under the same plan, to 1e-8 of the largest under a smaller one; and every loss

    python tests/drills/host_drills.py [--tries 20] [--seed 0] [--victims rank host] [--phases save] [--jsonl FILE]
Needs what `dualpipe_lab.world.emulate.hosts` needs: Linux, root and iproute2.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from host_site import PATIENCE, RANKS, STEPS, Site, distance, losses  # noqa: E402

from dualpipe_lab.dp.checkpoint import latest, saved_steps  # noqa: E402
from dualpipe_lab.train.result import read_weights  # noqa: E402
from dualpipe_lab.world.emulate import hosts  # noqa: E402

VICTIMS, PHASES = ("rank", "agent", "host", "rendezvous host"), ("start", "step", "save", "end")
BOUND = 1e-8  # for other weights than equal bits, relative to the largest
AGENT_SECONDS = 3.0  # for an agent to end after its ranks, before the drill ends it as a scheduler would
CAUSES = {
    "rank": r"rank {rank} of 4 died without an exception \(SIGKILL\)",
    "agent": r"its agent \(torchrun\) has ended, on host|the rendezvous at \S+ is gone",
    "host": r"was lost with node 1 \(host|ranks? (2|3|2, 3) (was|were) lost with",
    "rendezvous host": r"the rendezvous at \S+ is gone",
}
JOINING = r"did not come to|cannot connect them|reaches nobody at|does not reach"  # the words before a launch begins


@dataclass(frozen=True)
class Case:
    """What is killed, and when.

    Attributes:
        victim, phase: one of `VICTIMS`, of `PHASES`.
        number: of the try.
        rank: that strikes; it is the victim, or on the victim's host.
        count: number of the step or of the save; for the start 0 before the ranks are watched over, 1 after.
        share: of the calls in the phase.
        goes_on: how the training is resumed.
    """

    victim: str
    phase: str
    number: int
    rank: int
    count: int
    share: float
    goes_on: str

    @property
    def is_joining(self):
        """Whether the blow falls before the ranks have met."""
        return self.phase == "start" and self.count == 0


def drawn(victim, phase, number, seed):
    """Draw a moment."""
    draw = random.Random(f"{seed} {victim} {phase} {number}")
    rank = draw.choice({"host": [2, 3], "rendezvous host": [0, 1]}.get(victim, range(RANKS)))
    count = {"start": number % 2, "step": draw.randint(1, STEPS), "save": draw.randint(1, STEPS - 1), "end": STEPS}[
        phase
    ]
    goes_on = {"rank": "restart", "agent": "both hosts"}.get(victim, ("fresh host", "one host")[number // 2 % 2])
    return Case(victim, phase, number, rank, count, draw.random(), goes_on)


@dataclass
class Row:
    """What became of one try; times are in seconds after the blow."""

    case: Case
    moment: str = ""
    others: dict = field(default_factory=dict)  # by rank, the phase in which the blow met it
    explained: list = field(default_factory=list)  # host, seconds, sentence
    is_through: bool = False
    unexplained: list = field(default_factory=list)  # hosts, with their last lines
    ranks_ended: float | None = None
    agent: str = ""  # what an agent that lives did after its ranks had ended
    stacks: str = ""  # of agents that waited for each other
    broken: list = field(default_factory=list)  # visible checkpoints that are not whole, or of other weights
    left_over: list = field(default_factory=list)
    going_on: str = ""
    from_step: int | None = None
    is_resumed: bool = False
    distance: float | None = None
    is_equal: bool = False
    load: float = 0.0  # of the machine, processes that want to run
    wall: float = 0.0

    @property
    def is_right(self):
        """Explained or through, whole, clean, resumed and equal."""
        is_told = bool(self.explained or self.is_through) and not self.unexplained
        return is_told and not self.broken and not self.left_over and self.is_resumed and self.is_equal


def blow_of(job, seconds=PATIENCE):
    """Wait for the blow; return its time, the moment in words, and in which phase it met the other ranks."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        notes = {path.name: path.read_text() for path in Path(job["notes"]).glob(f"{job['start']}-0-*")}
        for name, text in notes.items():
            if found := re.search(r"^([\d.]+) struck (.*)$", text, re.MULTILINE):
                when = float(found[1])
                others = {other: phase_at(when, said) for other, said in sorted(notes.items()) if other != name}
                return when, found[2], {other.rpartition("-")[2]: phase for other, phase in others.items()}
        time.sleep(0.005)
    raise TimeoutError("the blow did not come")


def phase_at(when, notes):
    """The phase in which a rank was."""
    before = [line.split() for line in notes.splitlines() if float(line.split()[0]) <= when]
    return " ".join(before[-1][1:3]) if before else "not there"


def explanations(site, case, living, when):
    """By host, wait for its explanation; None for hosts whose ranks were through.

    Before the ranks are watched over, the agent of a killed one says how it ended, and all agents start theirs again.
    """
    pattern = CAUSES[case.victim].format(rank=case.rank) + (f"|{JOINING}" if case.phase == "start" else "")
    if case.is_joining and case.goes_on == "restart":
        pattern, living = rf"{pattern}|failed \(exitcode: -9\) local_rank: {case.rank % 2}", [case.rank // 2]
    outputs = {host: Path(site.agents.case["outputs"][host]) for host in living}
    found, deadline = {}, when + PATIENCE
    while found.keys() != set(living) and time.time() < deadline:
        for host in set(living) - found.keys():
            text = outputs[host].read_text()
            if said := re.search(rf"^.*({pattern}).*$", text, re.MULTILINE):
                found[host] = time.time() - when, said[0]
            elif len(re.findall(r"^THROUGH \d 0", text, re.MULTILINE)) == 2 - (
                host == case.rank // 2 and case.victim == "rank"
            ):
                found[host] = None
        time.sleep(0.02)
    return found


def end_of(site, living, when, row):
    """Wait until the ranks on living hosts have ended, then their agents; end an agent that does not."""
    agents, on = agents_of(site), [site.hosts[host] for host in living]
    wait_until(lambda: not any(set(host.pids()) - agents for host in on), PATIENCE)
    row.ranks_ended = time.time() - when
    row.left_over += [f"rank {pid} lives" for host in on for pid in set(host.pids()) - agents]
    if wait_until(lambda: not any(host.pids() for host in on), AGENT_SECONDS):
        row.agent = f"ended {time.time() - when:.1f} s after the blow"
    else:
        row.agent = f"waited more than {AGENT_SECONDS:g} s after its ranks, and was killed"
    kill_all(on)
    return site.agents.end()


def restarted(site, row, when):
    """Wait for agents that start their ranks again; end them where they do not come to an end."""
    on = site.hosts[:2]
    if not wait_until(lambda: not any(host.pids() for host in on), 20.0 if row.is_through else PATIENCE):
        row.agent = f"agents waited for each other {time.time() - when:.0f} s after the blow, and were killed"
        for agent in agents_of(site):
            os.kill(agent, signal.SIGUSR2)  # its stacks
        time.sleep(1)
        row.stacks = site.agents.text()[-12_000:]
        kill_all(on)
    return site.agents.end()


def agents_of(site):
    """The processes of the agents."""
    return {int(pid) for pid in re.findall(r"^AGENT (\d+)$", site.agents.text(), re.MULTILINE)}


def kill_all(on):
    """End every process on these hosts, whose links stay up."""
    for host in on:
        for pid in host.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_until(holds, seconds):
    """Whether something came to hold in time."""
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def drilled(site, case, name=None):
    """Hit a training, resume it, and compare."""
    began, row = time.monotonic(), Row(case, load=os.getloadavg()[0])
    job = site.begin(case, name or f"{case.victim}-{case.phase}-{case.number}".replace(" ", "-"))
    when, row.moment, row.others = blow_of(job)
    dead = case.rank // 2
    living = [0, 1] if case.victim in ("rank", "agent") else [1 - dead]
    found = explanations(site, case, living, when)
    row.explained = [[host, *said] for host, said in sorted(found.items()) if said]
    row.is_through = None in found.values()
    outcome = restarted(site, row, when) if case.goes_on == "restart" else end_of(site, living, when, row)
    left_alone = case.is_joining and case.goes_on == "restart"  # the other host's ranks are started again
    row.unexplained = [[host, outcome.texts[host][-2000:]] for host in living if host not in found and not left_alone]
    row.unexplained += [["all", "nobody has said anything"]] if not found else []
    check_site(site, case, row, job, living)
    on, row.going_on = site.hosts[:2], case.goes_on
    if case.goes_on != "restart" or outcome.codes != [0, 0]:
        spare, left = site.hosts[2], site.hosts[1 - dead]
        row.going_on = "both hosts" if case.goes_on == "restart" else case.goes_on
        places = {"fresh host": [spare, left] if dead == 0 else [left, spare], "one host": [left]}
        on = places.get(row.going_on, on)
        row.from_step = max(saved_steps(job["folder"]), default=0)
        outcome = site.resume(job, on)
    row.is_resumed = set(outcome.codes) == {0}
    compare(site, row, job)
    if not row.is_resumed:
        row.unexplained.append(["resumed", outcome.text[-3000:]])
    row.left_over += site.left_over(on)
    row.wall = time.monotonic() - began
    return row


def check_site(site, case, row, job, living):
    """Look at checkpoints and at what is left, then repair the host that was hit."""
    if row.going_on != "restart":
        row.broken = site.broken(job["folder"])
    row.left_over += [f"after the blow: {what}" for what in site.left_over([site.hosts[host] for host in living])]
    for host in site.hosts[:2]:
        host.join()


def compare(site, row, job):
    """The last weights, the curve and the folder beside those of the undisturbed training."""
    if not saved_steps(job["folder"]) or saved_steps(job["folder"])[-1] != STEPS:
        return
    row.distance = distance(read_weights(latest(job["folder"])), site.weights[STEPS])
    curve, bound = losses(job["folder"]), BOUND if row.going_on == "one host" else 0.0
    is_curve = len(curve) == STEPS and all(
        abs(loss - right) <= bound * right for loss, right in zip(curve, site.losses, strict=True)
    )
    row.is_equal = row.distance <= bound and is_curve
    hidden = [entry for entry in os.listdir(job["folder"]) if not entry.startswith("step-")]
    row.left_over += hidden if row.from_step != STEPS else []  # the next save removes them, and there was none


def summary(rows):
    """One line of the table: of n tries, how many were explained, after how long, and so on."""
    told = [row for row in rows if row.explained and not row.unexplained]
    seconds = [said[1] for row in told for said in row.explained]
    through = sum(row.is_through and not row.explained and not row.unexplained for row in rows)
    times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"
    return [
        str(len(rows)),
        f"{len(told)} of {len(rows) - through}" + (f" ({through} through)" if through else ""),
        times,
        f"{sum(row.is_resumed for row in rows)} of {len(rows)}",
        f"{sum(row.is_equal for row in rows)} of {len(rows)}",
        str(sum(bool(row.broken) for row in rows)),
        str(sum(bool(row.left_over) for row in rows)),
    ]


def main():
    """Print the table; fail if a training did not end as it should."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first try")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--jsonl", type=Path)
    chosen = parser.parse_args()
    if reason := hosts.obstacle():
        sys.exit(reason)
    cells = {(victim, phase): [] for victim in chosen.victims for phase in chosen.phases}
    with tempfile.TemporaryDirectory() as folder:
        site = Site(folder)
        for number in range(chosen.first, chosen.first + chosen.tries):
            for (victim, phase), rows in cells.items():
                rows.append(drilled(site, drawn(victim, phase, number, chosen.seed)))
                print(f"{'right' if rows[-1].is_right else 'WRONG'} {json.dumps(asdict(rows[-1]))}", flush=True)
                if chosen.jsonl:
                    with chosen.jsonl.open("a") as file:
                        file.write(json.dumps(asdict(rows[-1])) + "\n")
        site.close()
    names = (
        "killed",
        "phase",
        "tries",
        "explained",
        "seconds: median, worst",
        "resumed",
        "equal",
        "broken",
        "left over",
    )
    table = Table(*names)
    for (victim, phase), rows in cells.items():
        for is_joining, name in ((True, "start: joining"), (False, phase)):
            if some := [row for row in rows if row.case.is_joining == is_joining]:
                table.add_row(victim, name, *summary(some))
    Console(width=150).print(table)
    if wrong := sum(not row.is_right for rows in cells.values() for row in rows):
        sys.exit(f"{wrong} trainings did not end as they should")


if __name__ == "__main__":
    main()
