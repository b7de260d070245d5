"""The watchdog's thread: an event loop that beats, notices what ends beside it, and judges when something has failed.

  beat ... beat -> (alarm) -> report -> (verdict) -> the main thread raises, or the process ends
In: the store's records, handles on the processes of the node.  Out: one verdict, the same on every rank.
A second thread waits in the store for the alarm and the verdict: nothing is polled for, and a failure is known at once.
The observer is the first rank of the first node that lives; it alone reads all beats.  After an alarm, whoever hears of
no verdict for a while judges too; the first verdict that is written counts.
"""

import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dualpipe_lab.world import operating_system, payload
from dualpipe_lab.world.cluster.join import STORE_SECONDS
from dualpipe_lab.world.cluster.judge import Judge
from dualpipe_lab.world.cluster.observer import Observer, is_deadlock
from dualpipe_lab.world.cluster.processes import Neighbours, packed_log
from dualpipe_lab.world.cluster.status_store import (
    ALARM,
    RETURNED,
    Beat,
    Member,
    Report,
    StatusStore,
    Verdict,
    World,
)
from dualpipe_lab.world.record.rank_status import RankStatus
from dualpipe_lab.world.supervise.diagnosis import is_stuck
from dualpipe_lab.world.supervise.errors import RankFailure
from dualpipe_lab.world.supervise.supervisor import PROBE_SECONDS

JOIN_SECONDS = 4.0  # for a thread to end that may be in a request to the store
TICK_SECONDS = 0.05  # between two looks after an alarm
BLOCKED_SECONDS = 0.5  # for a main thread to come back to Python
LEAVE_SECONDS = 10.0  # for the main thread to leave the user's function once it has raised the verdict
MOVING_BYTES = 16_384  # between two beats: less is not the message that a rank waits for on a slow link
_ENDED_BY_SIGTERM = 128 + 15


class MainPart(Protocol):
    """What the thread asks of the main thread's part, a `Watchdog`, and tells it."""

    folder: Path
    finished: bool
    inside: bool
    signals: int | None
    error: BaseException | None
    raised: threading.Event
    closing: threading.Event
    delivered: threading.Event
    everyone_returned: threading.Event

    def terminated(self) -> bool: ...  # noqa: D102
    def read_signals(self) -> None: ...  # noqa: D102
    def interrupt_main(self) -> None: ...  # noqa: D102
    def leave(self, code: int, message: str) -> None: ...  # noqa: D102


class WatchLoop:
    """The threads of one rank's watchdog.

    Args:
        watch: the main thread's part.
        store: the records of this launch.
        world: this rank among the others.
        member: this rank, as the others find it.
        timeout: seconds of the launch.
        status: returns the status of this rank.
    """

    def __init__(
        self,
        watch: MainPart,
        store: StatusStore,
        world: World,
        member: Member,
        timeout: float | None,
        status: Callable[[int], RankStatus],
    ) -> None:
        self._watch, self._main_store, self._world, self._member = watch, store, world, member
        self._status, self._store, self._waiting_store = status, store.clone(), store.clone()
        self._neighbours = Neighbours(store.neighbours(member), _agent(world))
        self._started = time.monotonic()
        self._observer = Observer(timeout, self._started)
        self._judge = Judge(self._store, world, self._neighbours, self._observer)
        self._beat = Beat()
        self._before: tuple[RankStatus, int, float] | None = None
        self._returned: RankStatus | None = None
        self._reported: tuple[Any, int] | None = None  # what a still rank waits for, once it has posted its status
        self._alarmed_at: float | None = None
        self._failure: RankFailure | None = None
        self._inbox, self._outbox = os.pipe()
        os.set_blocking(self._inbox, False)
        self._verdict: Verdict | None = None
        self._store_error: Exception | None = None
        self._cpu_seconds = 0.0  # of this thread, which is not the rank's progress
        self._threads = [
            threading.Thread(target=target, name="dualpipe-lab-watchdog", daemon=True)
            for target in (self._run, self._wait_in_store)
        ]

    @property
    def has_neighbours(self) -> bool:
        """Whether another rank can read this one's files after a crash."""
        return bool(self._neighbours.members)

    # called by the main thread

    def start(self) -> None:
        """Start the threads."""
        operating_system.give_up_on_silent_peers(self._world.master_port, STORE_SECONDS)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads and close what they used."""
        self._tell("stop")
        with suppress(Exception):  # the store may be gone, and then its waiting thread has ended too
            self._main_store.release()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._inbox)
            os.close(self._outbox)
            self._neighbours.close()

    def return_(self, status: RankStatus) -> None:
        """Report this rank's function as returned."""
        self._returned = status
        self._tell("returned")

    def fail(self, failure: tuple[RankFailure, bytes | None]) -> None:
        """Report that this rank's function has raised."""
        self._failure = failure[0]
        with suppress(Exception):  # the store may be gone; the loop notices
            self._main_store.post("failure", failure)
            self._main_store.alarm()

    def _tell(self, what: str) -> None:
        with suppress(OSError):
            os.write(self._outbox, f"{what}\n".encode())

    # the thread that waits

    def _wait_in_store(self) -> None:
        try:
            why = self._waiting_store.wait_for_wake(0)
            if why == RETURNED:
                self._watch.everyone_returned.set()
                why = self._waiting_store.wait_for_wake(1)
            if why == ALARM:
                self._tell(ALARM)
                self._verdict = self._waiting_store.wait_for_verdict()
                self._tell("verdict")
        except Exception as error:
            self._store_error = error
            self._tell("lost")

    # the event loop

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._register(selector)
                self._turn(selector)
        except RuntimeError as error:  # torch's own classes for the store's errors are RuntimeErrors
            self._store_error = self._store_error or error
        if self._verdict is not None:
            self._act(self._verdict)
        elif self._store_error is not None and not self._watch.closing.is_set():
            self._explain_alone(self._store_error)

    def _register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._inbox, selectors.EVENT_READ, "inbox")
        if self._watch.signals is not None:
            selector.register(self._watch.signals, selectors.EVENT_READ, "signal")
        for handle in self._neighbours.handles:
            selector.register(handle, selectors.EVENT_READ, "death")
        if self._neighbours.agent_handle is not None:
            selector.register(self._neighbours.agent_handle, selectors.EVENT_READ, "agent")

    def _turn(self, selector: selectors.BaseSelector) -> None:
        """Handle events until there is a verdict or nothing more to watch."""
        next_beat = time.monotonic()
        while True:
            patience = next_beat - time.monotonic() if self._alarmed_at is None else TICK_SECONDS
            for key, _ in selector.select(max(0.0, patience)):
                if key.data == "inbox":
                    if not self._read_inbox():
                        return
                elif key.data == "signal":
                    self._watch.read_signals()
                    self._on_signal()
                else:
                    selector.unregister(key.fileobj)
                    self._on_end(key.data, key.fd)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + PROBE_SECONDS
                self._keep_time(now)
            if self._alarmed_at is not None:
                self._judge.collect(now, now - self._alarmed_at)

    def _read_inbox(self) -> bool:
        """Read what the other threads tell; False if the loop is over."""
        try:
            told = os.read(self._inbox, 1 << 12).decode().split()
        except BlockingIOError:
            return True
        if ALARM in told:
            self._on_alarm()
        if "returned" in told and self._returned is not None:
            self._store.post("report", Report(self._returned, b""))
            self._write_beat(still=0)
            self._store.return_()
        if "stop" in told and self._verdict is None and self._store_error is None:
            self._beat = replace(self._beat, left=self._watch.finished)
            self._store.beat(self._beat)
            return False
        return not ("verdict" in told or "lost" in told)

    def _on_alarm(self) -> None:
        if self._alarmed_at is None:
            self._alarmed_at = time.monotonic()
            self._store.post("final", Report(self._now(), packed_log(self._watch.folder)))

    def _on_end(self, kind: str, handle: int) -> None:
        """A process beside this one has ended."""
        if kind == "agent":
            who = f"its agent (torchrun) has ended, on host {self._member.host}"
            self._store.post("failure", (RankFailure(self._world.rank, f"cannot go on: {who}"), None))
            return self._store.alarm()
        rank, death = self._neighbours.death(handle)
        posted = {*self._store.ranks_of("failure"), *self._store.ranks_of("death")}
        if rank not in posted and not self._store.beats([rank])[rank].left:
            self._store.post("death", death, rank)
            self._store.alarm()
        return None

    def _on_signal(self) -> None:
        """SIGTERM ends a rank; an agent sends it to the others of its node when one has failed, which is known then."""
        if self._watch.terminated() and self._alarmed_at is None and self._failure is None:
            self._failure = RankFailure(self._world.rank, "died without an exception (SIGTERM)")
            self._store.post("failure", (self._failure, None))
            self._store.alarm()

    def _keep_time(self, now: float) -> None:
        """Beat, and look at the others."""
        if self._alarmed_at is None:
            self._write_beat(self._count_still(now))
            if self._is_observer(now):
                self._observe(now)
            else:
                self._observer.see(now, self._store.beats(self._tracked()))
        self._cpu_seconds = time.thread_time()

    def _write_beat(self, still: int) -> None:
        self._beat = Beat(self._beat.count + 1, still, self._returned is not None)
        self._store.beat(self._beat)

    def _count_still(self, now: float) -> int:
        """Beats for which this rank has stood still; its status is posted once for each operation it stands in."""
        if self._returned is not None:
            return 0
        status, before = self._now(), self._before
        moved = operating_system.moved_bytes(self._world.master_port) if status.blocked else 0
        self._before = status, moved, now
        rank = self._world.rank
        if before is None or moved - before[1] > MOVING_BYTES:
            return 0
        if not is_stuck({rank: before[0]}, {rank: status}, now - before[2]):
            return 0
        standing = status.blocked, status.completed
        if standing != self._reported:
            self._store.post("report", Report(status, b""))
            self._reported = standing
        return self._beat.still + 1

    def _now(self) -> RankStatus:
        """The status of this rank without the processor time of its watchdog."""
        status = self._returned or self._status(self._world.rank)
        return replace(status, cpu_seconds=status.cpu_seconds - self._cpu_seconds)

    # the observer

    def _is_observer(self, now: float) -> bool:
        return self._judge.is_first({*self._observer.silent(now), *self._observer.left()})

    def _tracked(self) -> list[int]:
        """The ranks whose silence makes this one the observer: the first two candidates, then all before it."""
        before = self._judge.candidates[: self._judge.candidates.index(self._world.rank)]
        return before[:2] if not self._observer.silent(time.monotonic()) else before

    def _observe(self, now: float) -> None:
        """Look at all beats, and raise the alarm if ranks are stuck, late or gone."""
        self._observer.see(now, self._store.beats(range(self._world.world_size)))
        if self._observer.is_late(now):
            self._judge.headline = self._observer.late_headline()
        elif self._observer.seems_stuck(now) and self._is_deadlock():
            self._judge.headline = self._observer.stuck_headline(now)
        elif not self._judge.find_gone(now):
            return
        self._store.alarm()

    def _is_deadlock(self) -> bool:
        running = self._observer.running()
        statuses = {rank: report.status for rank, report in self._store.posted("report").items()}
        if not statuses.keys() >= set(running):
            return False
        still = {rank: statuses.pop(rank) for rank in running}
        return is_deadlock(still, statuses)

    # the end

    def _act(self, verdict: Verdict) -> None:
        """Hand the error to the main thread, or end the process if that is blocked."""
        try:
            error = payload.loads(verdict.error)
        except Exception:
            error = payload.loads(verdict.plain)  # the exception's class is unknown on this rank
        self._neighbours.kill(verdict.lost)
        with suppress(Exception):
            self._acknowledge(verdict)
        self._end(error, self._world.rank in verdict.printers)

    def _acknowledge(self, verdict: Verdict) -> None:
        """Say that this rank knows; where the store may end with this node's ranks, wait for the others to know."""
        self._store.acknowledge()
        deadline = time.monotonic() + 1.0
        while self._member.node in (0, None) and time.monotonic() < deadline:
            if self._store.num_acknowledged() >= len(verdict.living):
                return
            time.sleep(TICK_SECONDS / 2)

    def _end(self, error: BaseException, prints: bool) -> None:
        watch = self._watch
        watch.error = error
        watch.delivered.set()
        code = _ENDED_BY_SIGTERM if watch.terminated() else 1
        if not watch.closing.is_set() and watch.inside:
            watch.interrupt_main()
            watch.raised.wait(BLOCKED_SECONDS)
        if not watch.closing.wait(LEAVE_SECONDS if watch.raised.is_set() or not watch.inside else 0.0):
            self._neighbours.close()
            watch.leave(code, f"{type(error).__name__}: {error}" if prints else "")

    def _explain_alone(self, cause: Exception) -> None:
        """The store is gone: say what this rank knows, unless the launch is about to end anyway."""
        if self._returned is not None and self._watch.everyone_returned.is_set():
            return  # other ranks are through, and one of them held the store
        if not self._watch.closing.wait(BLOCKED_SECONDS):
            error, prints = self._judge.without_store(self._status(self._world.rank), self._failure)
            self._end(error, prints)


def _agent(world: World) -> int | None:
    """The process of torchrun's agent, without which nobody ends or restarts these ranks."""
    return os.getppid() if world.agent_hosts_store else None
