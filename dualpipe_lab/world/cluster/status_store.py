"""The ranks' heartbeats, statuses and failures in the store where they met, for the watchdog.

Chapter: book/appendix/gpus.  In: a store of torch.distributed, over a connection of one's own.  Out: records by rank.
  written by each rank   a `Beat` of 7 bytes per interval; a status only if it has not moved for a while, or is asked
  read by each rank      one beat of another rank per interval; by the observer, all beats in one request
Every key has the number of the launch as prefix.  A key that nobody may have set yet is never waited for: the kinds of
records have a list each of the ranks that have posted one.
Elsewhere: torchrun's own rendezvous keeps agents alive in the same way, and knows nothing of what the ranks wait for.
"""

import struct
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from dualpipe_lab.world import payload
from dualpipe_lab.world.record.rank_status import RankStatus

if TYPE_CHECKING:
    from torch.distributed import Store

KINDS = ("report", "final", "failure", "death", "stack")
RETURNED, ALARM, STOP = "returned", "alarm", "stop"  # why a rank is woken
STOPPED = "stopped"  # in place of a stack: a signal has stopped the process
_FORMAT = "=IB??"
_ENDED = "watchdog-ended"
_FOREVER = timedelta(days=20)  # the most that poll(2) counts in milliseconds
_OWN_LIMIT = timedelta(seconds=30)  # of one request


@dataclass(frozen=True)
class Beat:
    """A sign of life of one rank.

    Attributes:
        count: number of beats so far.
        still: number of beats for which the rank has waited for the same operation and moved nothing.
        returned: whether its function has returned.
        left: whether its launch is over.
    """

    count: int = 0
    still: int = 0
    returned: bool = False
    left: bool = False

    def pack(self) -> bytes:
        """The beat as bytes."""
        return struct.pack(_FORMAT, self.count, min(self.still, 255), self.returned, self.left)


class World(Protocol):
    """What the watchdog asks of an `Environment`."""

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def world_size(self) -> int: ...  # noqa: D102
    @property
    def local_rank(self) -> int: ...  # noqa: D102
    @property
    def node(self) -> int | None: ...  # noqa: D102
    @property
    def master_addr(self) -> str: ...  # noqa: D102
    @property
    def master_port(self) -> int: ...  # noqa: D102
    @property
    def agent_hosts_store(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class Member:
    """A rank of this launch, where it runs, and where the others find it.

    Attributes:
        rank, local_rank, node: its number, that on its node, and that of its node; None if nodes have no numbers.
        host: name of its host.
        address, port: of a socket on which it listens and accepts nothing: the kernel answers while the process lives.
        space: name of the set of processes that see each other by number.
        pid: number of its process.
        folder: private folder with its stack and its operation log.
    """

    rank: int
    local_rank: int
    node: int | None
    host: str
    address: str
    port: int
    space: str
    pid: int
    folder: str

    @property
    def place(self) -> str:
        """Name of the node, and of the set of processes on it that see each other."""
        return f"{self.node}-{self.space}"


@dataclass(frozen=True)
class Report:
    """Status of a rank with its packed operation log."""

    status: RankStatus
    log: bytes


@dataclass(frozen=True)
class Death:
    """End of a process that said nothing, as another rank of its node has seen it; `code` is None if unknown."""

    code: int | None
    stack: str
    log: bytes


@dataclass(frozen=True)
class Verdict:
    """What ended the launch.

    Attributes:
        error, plain: the pickled error with the ranks' own exceptions, and without them.
        printers: ranks that print it if their main thread cannot raise it.
        living: ranks that will act on it.
        lost: ranks that answer no more, and are killed by their neighbours.
    """

    error: bytes
    plain: bytes
    printers: tuple[int, ...]
    living: tuple[int, ...]
    lost: tuple[int, ...]


class StatusStore:
    """The records of one launch; one object per thread, each over a connection of its own.

    Args:
        store: of torch.distributed.
        rank, world_size: of this rank.
        launch: number of the launch among those of these ranks.
    """

    def __init__(self, store: "Store", rank: int, world_size: int, launch: int) -> None:
        import torch.distributed as dist

        self._root, self._launch = store, launch
        self._store = dist.PrefixStore(f"watchdog-{launch}", store)
        self.rank, self.world_size = rank, world_size

    @classmethod
    def for_next_launch(cls, store: "Store", rank: int, world_size: int) -> "StatusStore":
        """Number a launch, which all ranks count alike, and remove this rank's records of an earlier one.

        Raises:
            RuntimeError: the ranks have failed in an earlier launch, and some of them are no more.
        """
        if store.check([_ENDED]):
            raise RuntimeError(
                "an earlier launch of these ranks has failed, and some of them have ended; no launch follows it: let "
                "the script end, and start all ranks again (torchrun --max-restarts does)"
            )
        found = cls(store, rank, world_size, store.add(f"watchdog-launches-{rank}", 1))
        if found._launch > 2:
            found._forget(found._launch - 2)
        return found

    def clone(self) -> "StatusStore":
        """The same records over another connection, for another thread."""
        store = self._root.clone()
        store.set_timeout(_OWN_LIMIT)
        return StatusStore(store, self.rank, self.world_size, self._launch)

    def arrive(self, member: Member) -> None:
        """Enter this rank; the last one lets all go."""
        self.beat(Beat())
        self._store.set(f"member-{self.rank}", payload.dumps(member))
        for kind in KINDS:
            self._store.append(kind, "")
        self._store.append(_neighbourhood(member), f"{self.rank},")
        self._store.append("firsts", f"{self.rank}," if member.local_rank == 0 else "")
        if self._store.add("arrived", 1) == self.world_size:
            self._store.set("go", "")

    @property
    def is_first_launch(self) -> bool:
        """Whether these ranks have not launched before."""
        return self._launch == 1

    def wait_for_go(self, seconds: float) -> list[int]:
        """Wait until all ranks have arrived; return those that have not after so many seconds."""
        with suppress(Exception):  # torch's own class for a timeout has moved
            self._store.wait(["go"], timedelta(seconds=seconds))
        if self._store.check(["go"]):
            return []
        return [rank for rank in range(self.world_size) if not self._store.check([f"member-{rank}"])]

    def firsts(self) -> list[int]:
        """The first rank of each node, in order."""
        return sorted(self._list("firsts"))

    def neighbours(self, member: Member) -> list[Member]:
        """The ranks whose processes this one can see, without itself."""
        return self.members(rank for rank in self._list(_neighbourhood(member)) if rank != self.rank)

    def members(self, ranks: Iterable[int]) -> list[Member]:
        """Where these ranks run."""
        return [payload.loads(data) for data in self._get(f"member-{rank}" for rank in ranks)]

    def beat(self, beat: Beat) -> None:
        """Write this rank's beat."""
        self._store.set(f"beat-{self.rank}", beat.pack())

    def beats(self, ranks: Iterable[int]) -> dict[int, Beat]:
        """The newest beats of these ranks."""
        ranks = list(ranks)
        found = self._get(f"beat-{rank}" for rank in ranks)
        return {rank: Beat(*struct.unpack(_FORMAT, data)) for rank, data in zip(ranks, found, strict=True)}

    def post(self, kind: str, record: object, rank: int | None = None) -> None:
        """Write a record of one of `KINDS` about a rank, this one by default."""
        about = self.rank if rank is None else rank
        self._store.set(f"{kind}-{about}", payload.dumps(record))
        self._store.append(kind, f"{about},")

    def posted(self, kind: str, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """The records of a kind, by rank; of these ranks, or of all."""
        there = [rank for rank in self.ranks_of(kind) if ranks is None or rank in ranks]
        found = self._get(f"{kind}-{rank}" for rank in there)
        return {rank: payload.loads(data) for rank, data in zip(there, found, strict=True)}

    def ranks_of(self, kind: str) -> list[int]:
        """The ranks about which there is a record of this kind."""
        return sorted(set(self._list(kind)))

    def return_(self) -> None:
        """Count this rank as returned; the last one wakes all."""
        if self._store.add("returned", 1) == self.world_size:
            self._wake(range(self.world_size), RETURNED, (0,))

    def alarm(self) -> None:
        """Wake all ranks: something has failed."""
        self._wake(range(self.world_size), ALARM, (0, 1))

    def release(self) -> None:
        """Wake the thread of this rank that waits."""
        self._wake([self.rank], STOP, (0, 1))

    def wait_for_wake(self, number: int) -> str:
        """Wait, for days if need be, until this rank is woken; each rank is woken twice at most."""
        key = f"wake-{number}-{self.rank}"
        self._store.wait([key], _FOREVER)
        return str(self._store.get(key), "ascii")

    def propose(self, verdict: Verdict) -> None:
        """Write the verdict unless there is one, and let these ranks launch no more."""
        self._root.set(_ENDED, "")
        self._store.compare_set("verdict", "", payload.dumps(verdict))

    def wait_for_verdict(self) -> Verdict:
        """Wait until somebody has written the verdict, and return it."""
        self._store.wait(["verdict"], _FOREVER)
        verdict: Verdict = payload.loads(self._store.get("verdict"))
        return verdict

    def acknowledge(self) -> None:
        """Say that this rank has the verdict."""
        self._store.add("acknowledged", 1)

    def num_acknowledged(self) -> int:
        """Ranks that have said so."""
        return int(self._store.add("acknowledged", 0))

    def _wake(self, ranks: Iterable[int], why: str, numbers: tuple[int, ...]) -> None:
        keys = [f"wake-{number}-{rank}" for rank in ranks for number in numbers]
        self._store.multi_set(keys, [why] * len(keys))

    def _list(self, key: str) -> list[int]:
        return [int(rank) for rank in self._store.get(key).decode().split(",") if rank]

    def _get(self, keys: Iterable[str]) -> list[bytes]:
        keys = list(keys)
        return list(self._store.multi_get(keys)) if keys else []

    def _forget(self, launch: int) -> None:
        """Remove what this rank has written for a launch; every rank has arrived at a later one, or is about to."""
        import torch.distributed as dist

        old = dist.PrefixStore(f"watchdog-{launch}", self._root)
        own = ("member", "beat", "report", "wake-0", "wake-1")
        keys = [f"{name}-{self.rank}" for name in own]
        if self.rank == 0:
            keys += ["go", "arrived", "returned", "firsts", *KINDS]
        for key in keys:
            old.delete_key(key)


def _neighbourhood(member: Member) -> str:
    return f"node-{member.place}"
