"""The observer: from the heartbeats of all ranks to a suspicion, and from their records to the error of the launch.

Chapter: book/appendix/gpus.  In: beats round after round, records that ranks have posted.  Out: RankError, RankTimeout.
  stuck      every rank that has not returned says that it waits for the same operation, for STUCK_ROUNDS beats
  silent     a rank has not beaten for SILENT_SECONDS; whether its process lives is asked elsewhere
Nothing here reads a clock or a store: times and records are passed in.  The words are those of `supervise`.
Elsewhere: torch's flight recorder, whose dumps are compared after the job has ended.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dualpipe_lab.world.cluster.status_store import STOPPED, Beat, Death, Member, Report
from dualpipe_lab.world.record.rank_status import RankStatus
from dualpipe_lab.world.supervise.diagnosis import is_stuck
from dualpipe_lab.world.supervise.errors import RankError, RankFailure, RankTimeout
from dualpipe_lab.world.supervise.failure_report import FailureReport
from dualpipe_lab.world.supervise.supervisor import PROBE_SECONDS, STUCK_ROUNDS

SILENT_SECONDS = 3 * PROBE_SECONDS


class Observer:
    """What the beats of all ranks say.

    Args:
        timeout: seconds after which the launch is stopped; None for never.
        started: when the ranks began, in seconds of the clock whose times the methods get.
    """

    def __init__(self, timeout: float | None, started: float) -> None:
        self._timeout, self._started = timeout, started
        self._beats: dict[int, Beat] = {}
        self._changed: dict[int, float] = {}

    def see(self, now: float, beats: Mapping[int, Beat]) -> None:
        """Take in one round of beats."""
        for rank, beat in beats.items():
            if rank not in self._beats or beat.count != self._beats[rank].count or beat.left:
                self._changed[rank] = now
            self._beats[rank] = beat

    def running(self) -> list[int]:
        """Ranks whose function has not returned."""
        return [rank for rank, beat in self._beats.items() if not beat.returned and not beat.left]

    def left(self) -> set[int]:
        """Ranks whose launch is over."""
        return {rank for rank, beat in self._beats.items() if beat.left}

    def silent(self, now: float, seconds: float = SILENT_SECONDS) -> list[int]:
        """Ranks that have not beaten for so long."""
        return [rank for rank, changed in self._changed.items() if now - changed > seconds]

    def silence(self, now: float, rank: int) -> float:
        """Seconds since this observer saw the rank's last beat; 0 for a rank that it has not looked at before."""
        return max(now - self._changed.get(rank, now), 0.0)

    def seems_stuck(self, now: float) -> bool:
        """Whether all ranks that run have stood still for long enough, and still beat."""
        running = self.running()
        silent = set(self.silent(now, 2 * PROBE_SECONDS))
        return bool(running) and all(self._beats[rank].still >= STUCK_ROUNDS and rank not in silent for rank in running)

    def is_late(self, now: float) -> bool:
        """Whether the time limit has passed for a function that still runs."""
        return self._timeout is not None and now - self._started > self._timeout and bool(self.running())

    def stuck_headline(self, now: float) -> str:
        """First line of the error of a deadlock."""
        return f"no progress; gave up after {now - self._started:.1f} s. Where each rank was:"

    def late_headline(self) -> str:
        """First line of the error after the time limit."""
        return f"the time limit of {self._timeout:g} s passed (timeout=). Where each rank was:"


def is_deadlock(statuses: Mapping[int, RankStatus], returned: Mapping[int, RankStatus]) -> bool:
    """Whether ranks that have stood still can never go on, by their statuses and those of ranks that have returned.

    A message that is under way to a rank that waits for it is slow, and so is a collective that all have reached.
    """
    everyone = {**returned, **statuses}
    return is_stuck(statuses, statuses, 1.0) and not any(_is_coming(status, everyone) for status in statuses.values())


def _is_coming(status: RankStatus, statuses: Mapping[int, RankStatus]) -> bool:
    """Whether the message that a rank waits for has been sent to it."""
    blocked = status.blocked
    peer = None if blocked is None or blocked.sends is not False else blocked.peer
    if blocked is None or peer is None or peer not in statuses:
        return False
    return statuses[peer].sent[status.rank, blocked.tag] > status.received[peer, blocked.tag]


@dataclass
class Records:
    """What the ranks have posted when a launch ends.

    Attributes:
        world_size: number of ranks.
        returned: ranks whose function has returned.
        reports: newest status and operation log by rank.
        failures: ranks that raised.
        deaths: ranks whose process ended, as seen on their node.
        gone: members whose process or host answers no more.
        stacks: of ranks that live and are silent; `stopped` for one that a signal has stopped.
    """

    world_size: int
    returned: set[int] = field(default_factory=set)
    reports: dict[int, Report] = field(default_factory=dict)
    failures: dict[int, RankFailure] = field(default_factory=dict)
    deaths: dict[int, Death] = field(default_factory=dict)
    gone: dict[int, Member] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def has_cause(self) -> bool:
        """Whether a rank failed by itself, and not because it lost its peer."""
        return bool(self.deaths or self.gone) or any(not failure.secondary for failure in self.failures.values())

    @property
    def failed(self) -> set[int]:
        """All ranks that have failed in some way."""
        return set(self.failures) | set(self.deaths) | set(self.gone)

    def error(self, folder: Path, members: Iterable[Member], silence: Mapping[int, float]) -> RankError:
        """Error of a launch in which ranks failed.

        Args:
            folder: an empty one for temporary files.
            members: all ranks, where a node is among the failed; else what is known of them.
            silence: of each gone rank, in seconds.
        """
        ranks = self._observed()
        report = self._written(folder)
        for rank, member in self.gone.items():
            ranks[rank].failure = RankFailure(rank, _loss(member, self.gone, list(members), silence[rank]))
        for rank, death in self.deaths.items():
            ranks[rank].process = _ended(death.code)
            ranks[rank].failure = report.died(ranks[rank])
        for rank, failure in self.failures.items():
            ranks[rank].failure = failure
        return report.error(ranks.values())

    def timeout(self, folder: Path, headline: str, seconds: float) -> RankTimeout:
        """Error of a launch that does not move."""
        return self._written(folder).timeout(self._observed().values(), headline, seconds)

    def _observed(self) -> dict[int, Any]:
        """The ranks as `FailureReport` knows them."""
        return {
            rank: SimpleNamespace(
                rank=rank,
                process=None,
                result=b"returned" if rank in self.returned else None,
                failure=None,
                statuses=[self.reports[rank].status] if rank in self.reports else [],
            )
            for rank in range(self.world_size)
        }

    def _written(self, folder: Path) -> "_ClusterReport":
        """A report that finds stacks and operation logs where the supervisor's does."""
        for rank, stack in (self.stacks | {rank: death.stack for rank, death in self.deaths.items()}).items():
            (folder / f"stack-{rank}").write_text("" if stack == STOPPED else stack)
        logs = {rank: report.log for rank, report in self.reports.items()}
        logs |= {rank: death.log for rank, death in self.deaths.items()}
        for rank, log in logs.items():
            if log:
                (folder / f"operations-{rank}").write_bytes(zlib.decompress(log))
        return _ClusterReport(folder, set(), self.world_size, self.stacks)


class _ClusterReport(FailureReport):
    """A failure report that tells a stopped process from one that holds the interpreter's lock."""

    def __init__(self, folder: Path, cells: set[str], world_size: int, stacks: Mapping[int, str]) -> None:
        super().__init__(folder, cells, world_size)
        self._stacks = stacks

    def _describe(self, observed: Any) -> str:
        if not observed.statuses and observed.result is None and self._stacks.get(observed.rank) == STOPPED:
            return f"rank {observed.rank}: was stopped by a signal (SIGSTOP), so it cannot answer"
        return super()._describe(observed)


def _ended(code: int | None) -> Any:
    return SimpleNamespace(process=SimpleNamespace(exitcode=code, join=lambda seconds: None))


def _loss(member: Member, gone: Mapping[int, Member], members: list[Member], silence: float) -> str:
    """`was lost with node 1 (host beta, ranks 2, 3): no heartbeat for 2.1 s`, or the words for one process."""
    mates = sorted(other.rank for other in members if other.place == member.place)
    said = f"no heartbeat for {silence:.1f} s, and nothing answers at {member.address}"
    if member.node is None or not all(rank in gone for rank in mates):
        return f"died without an exception (its process is gone): {said}"
    ranks = f"ranks {', '.join(map(str, mates))}" if len(mates) > 1 else f"rank {member.rank}"
    return f"was lost with node {member.node} (host {member.host}, {ranks}): {said}"
