"""The judge: after an alarm, from what the ranks report to one verdict; it asks silent processes and distant kernels.

Chapter: book/appendix/gpus.  In: the records in the store, handles on the processes of the node.  Out: a `Verdict`.
Who is silent after an alarm is asked twice: its neighbours ask its process for a stack, and the judge asks the kernel
of its host whether the process lives.  Every rank has a judge; the first candidate that lives acts, then whoever hears
nothing.
"""

import selectors
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualpipe_lab.world import payload
from dualpipe_lab.world.cluster.observer import SILENT_SECONDS, Observer, Records
from dualpipe_lab.world.cluster.processes import Neighbours, answering
from dualpipe_lab.world.cluster.status_store import Member, StatusStore, Verdict, World
from dualpipe_lab.world.record.rank_status import RankStatus
from dualpipe_lab.world.supervise.diagnosis import locate
from dualpipe_lab.world.supervise.errors import RankError, RankFailure, RankTimeout
from dualpipe_lab.world.supervise.failure_report import name_frame, user_frame
from dualpipe_lab.world.supervise.supervisor import GRACE_SECONDS, PROBE_SECONDS

REPORT_SECONDS = 0.5  # after an alarm, for a rank to report before its process is asked for its stack
STACK_SECONDS = 1.2  # after an alarm, for the stacks of silent ranks to be there
LOST_SECONDS = 3.0  # after an alarm, for a cause where ranks have only lost their peers
OTHERS_SECONDS = 4.0  # after an alarm, for the first candidate's verdict before another rank judges
ANSWER_SECONDS = 1.5  # for a distant kernel to accept a connection: it may have to be asked twice


class Judge:
    """Judges for one rank.

    Args:
        store: the records of this launch, for the thread that calls the judge.
        world: this rank among the others.
        neighbours: the other processes of its node.
        observer: what the beats say.

    Attributes:
        headline: of the error if no rank has failed.
        candidates: ranks in the order in which they observe and judge: the first of each node, then the others.
    """

    def __init__(self, store: StatusStore, world: World, neighbours: Neighbours, observer: Observer) -> None:
        self._store, self._world, self._neighbours, self._observer = store, world, neighbours, observer
        firsts = store.firsts()
        self.candidates = [*firsts, *(rank for rank in range(world.world_size) if rank not in firsts)]
        self.headline = ""
        self._started = time.monotonic()
        self._looked = self._judged = False
        self._gone: dict[int, Member] = {}
        self._probed: set[int] = set()  # after the alarm
        self._probe_after: dict[int, float] = {}

    def is_first(self, ended: set[int]) -> bool:
        """Whether this rank is the first candidate that has not ended."""
        rank = self._world.rank
        return next(other for other in self.candidates if other not in ended or other == rank) == rank

    def find_gone(self, now: float) -> bool:
        """Ask the kernels of silent ranks, after ever longer times, whether their processes live."""
        if not any(now >= self._probe_after.get(rank, 0.0) for rank in self._observer.silent(now)):
            return False
        return self._probe(self._observer.silent(now, 1.5 * PROBE_SECONDS), now)  # also what fell silent just after

    def collect(self, now: float, since: float) -> None:
        """Gather what the ranks report, so many seconds after the alarm, and write a verdict when it is complete."""
        if not self._looked and since > REPORT_SECONDS:
            self._looked = True
            self._look_at_silent_neighbours()
        ended = {*self._store.ranks_of("death"), *self._gone}
        if self._judged or not (self.is_first(ended) or since > OTHERS_SECONDS):
            return
        records = self._records()
        silent = self._silent(records)
        if since > REPORT_SECONDS and (unknown := silent - self._probed):
            self._probed |= unknown
            self._probe(sorted(unknown), now)
            records = self._records()
            silent = self._silent(records)
        if records.failed:
            has_cause = records.has_cause or since > LOST_SECONDS
            is_over = len(records.failed | records.returned) == records.world_size
            is_ready = has_cause and (is_over or since > (REPORT_SECONDS if silent else GRACE_SECONDS))
        else:
            is_ready = not silent or since > STACK_SECONDS
        if is_ready:
            self._write_verdict(records, now, silent)

    def without_store(self, status: RankStatus, failure: RankFailure | None) -> tuple[RankError | RankTimeout, bool]:
        """The error if the store is gone, from what this rank knows, and whether this rank prints it for its node."""
        place = f"{self._world.master_addr}:{self._world.master_port}"
        said = f"the rendezvous at {place} is gone: its process has ended, or its host answers nothing"
        ended = dict(self._neighbours.death(handle) for handle in self._ended_beside())
        deaths = {rank: death for rank, death in ended.items() if not self._neighbours.has_left(rank)}
        failures = {} if failure is None else {self._world.rank: failure}
        records = Records(self._world.world_size, failures=failures, deaths=deaths)
        error: RankError | RankTimeout
        if records.failed:
            with _temporary_folder() as folder:
                found = records.error(Path(folder), [], {})
            error = RankError(found.failures, found.world_size, [*found.notes, said, locate(status, _line)])
        else:
            headline = f"{said}. What rank {self._world.rank} knows:"
            error = RankTimeout(headline, [locate(status, _line)], time.monotonic() - self._started)
        first = min(rank for rank in (*self._neighbours.members, self._world.rank) if rank not in deaths)
        return error, first == self._world.rank

    def _probe(self, ranks: list[int], now: float) -> bool:
        members = self._store.members(ranks)
        living = answering(members, ANSWER_SECONDS)
        self._gone |= {member.rank: member for member in members if member.rank not in living}
        waited = {rank: now - self._probe_after.get(rank, now) + SILENT_SECONDS for rank in ranks}
        self._probe_after |= {rank: now + 2 * seconds for rank, seconds in waited.items()}
        return bool(self._gone)

    def _look_at_silent_neighbours(self) -> None:
        """Ask the processes of this node that report nothing for their stacks; the first that reports does it."""
        answered = {*self._store.ranks_of("final"), *self._store.ranks_of("death")}
        silent = [rank for rank in self._neighbours.members if rank not in answered]
        first = min(rank for rank in (*self._neighbours.members, self._world.rank) if rank not in silent)
        if silent and first == self._world.rank:
            for rank, stack in self._neighbours.ask_stacks(silent).items():
                self._store.post("stack", stack, rank)

    def _silent(self, records: Records) -> set[int]:
        """Ranks that have neither reported nor failed."""
        return set(range(records.world_size)) - set(records.reports) - records.failed - self._observer.left()

    def _records(self) -> Records:
        failures = {
            rank: replace(failure, exception=_rebuilt(exception))
            for rank, (failure, exception) in self._store.posted("failure").items()
        }
        deaths = {rank: death for rank, death in self._store.posted("death").items() if rank not in failures}
        stacks = self._store.posted("stack")  # asked for its stack, a rank may wake up and report after all
        beats = self._store.beats(range(self._world.world_size))
        self._observer.see(time.monotonic(), beats)
        return Records(
            self._world.world_size,
            {rank for rank, beat in beats.items() if (beat.returned or beat.left) and rank not in stacks},
            {rank: report for rank, report in self._store.posted("final").items() if rank not in stacks},
            failures,
            deaths,
            {rank: member for rank, member in self._gone.items() if rank not in deaths and rank not in failures},
            stacks,
        )

    def _write_verdict(self, records: Records, now: float, silent: set[int]) -> None:
        self._judged = True
        members = self._store.members(range(self._world.world_size))
        with _temporary_folder() as folder:
            error: RankError | RankTimeout
            if records.failed:
                seen = time.monotonic()
                silence = {rank: self._observer.silence(seen, rank) for rank in records.gone}
                error = records.error(Path(folder), members, silence)
            else:
                headline = self.headline or self._observer.stuck_headline(now)
                error = records.timeout(Path(folder), headline, now - self._started)
        ended = set(records.deaths) | set(records.gone) | silent | self._observer.left()
        living = tuple(rank for rank in range(self._world.world_size) if rank not in ended)
        places = {rank: members[rank].place for rank in living}
        printers = tuple(
            min(rank for rank in living if places[rank] == place) for place in sorted(set(places.values()))
        )
        plain = payload.dumps(_without_exceptions(error))
        try:
            complete = payload.dumps(error)
        except Exception:
            complete = plain
        self._store.propose(Verdict(complete, plain, printers, living, tuple(sorted(silent))))

    def _ended_beside(self) -> list[int]:
        """Handles of the processes of this node that have ended."""
        if not self._neighbours.handles:
            return []
        with selectors.DefaultSelector() as selector:
            for handle in self._neighbours.handles:
                selector.register(handle, selectors.EVENT_READ)
            return [key.fd for key, _ in selector.select(0)]


def _temporary_folder() -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="dualpipe-verdict-")


def _rebuilt(exception: bytes | None) -> BaseException | None:
    try:
        found: BaseException | None = payload.loads(exception) if exception else None
    except Exception:
        return None  # its class exists in the rank alone; the text has arrived
    return found


def _without_exceptions(error: Any) -> Any:
    if not isinstance(error, RankError):
        return error
    failures = {rank: replace(failure, exception=None) for rank, failure in error.failures.items()}
    return RankError(failures, error.world_size, error.notes)


def _line(status: RankStatus) -> str:
    frame = user_frame(status.frames, ())
    return name_frame(frame) if frame else ""
