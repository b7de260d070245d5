"""Saves of several hosts to one storage, in every order that matters, with hosts lost at any moment.

Chapter: book/hosts/failures.  In: a generator `save(storage, host, num_hosts, step, shard)` that yields where all hosts
wait for each other, and `load(storage, num_hosts)`.  Out: what is wrong with them, in words.
A host stops before each of its operations: its generator is run again from the beginning, with the answers that the
operations gave, up to the next one.  So one process runs any order, and a loss is a generator that is not run again.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from zlib import crc32

from dualpipe_course.plain import plain
from dualpipe_course.trial import on_ranks

Event: TypeAlias = tuple[Any, ...]  # ("write", name, data), ("yield",), ("return",)
Files: TypeAlias = dict[str, bytes]
Loaded: TypeAlias = tuple[int, list[bytes]] | None
SECONDS = 60.0  # an answer takes 1 to 5
STRIDE, SHARD_BYTES, BUDGET = 5, 120, 2.5  # steps between saves; bytes; saves that may stay, with their index
MANY = 100  # leftovers on which each second loss is tried; of more of them, every second, third ... loss
BARRIER, END = ("yield",), ("return",)


class Stop(BaseException):
    """Raised in a save at the operation that comes next; no `except Exception` keeps it."""

    def __init__(self, event: Event) -> None:
        super().__init__(event)
        self.event = event


class Flaw(Exception):  # noqa: N818 - a finding, not an accident
    """What is wrong, in words."""


class Storage:
    """The storage as one host sees it: its history answers what it did before, and the next operation stops."""

    def __init__(self, history: Sequence[tuple[Event, Any]]) -> None:
        self._history, self._place = history, 0

    def write(self, name: str, data: bytes) -> None:
        """Write a file, also over one that is there."""
        self._operate("write", _name(name), bytes(data) if not isinstance(data, int | str) else _refuse(data))

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in one step; a file that had the name is gone."""
        self._operate("rename", _name(old), _name(new))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._operate("remove", _name(name))

    def names(self) -> list[str]:
        """The names of all files, sorted."""
        return list(self._operate("names"))

    def read(self, name: str) -> bytes:
        """The bytes of a file; FileNotFoundError if it is not there."""
        data: bytes = self._operate("read", _name(name))
        return data

    def arrive(self) -> None:
        """Wait for all hosts."""
        self._operate(*BARRIER)

    def _operate(self, *event: Any) -> Any:
        if self._place == len(self._history):
            raise Stop(event)
        known, answer = self._history[self._place]
        if known != event:
            raise Flaw(
                f"the check runs save from its beginning many times; with the same answers it did {_words(known)} once "
                f"and {_words(event)} later; let it depend on its arguments and the storage alone"
            )
        self._place += 1
        if isinstance(answer, OSError):
            raise FileNotFoundError(*answer.args)
        return answer


class Reader:
    """The storage for `load`, which may only read."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def names(self) -> list[str]:
        """The names of all files, sorted."""
        return sorted(self._files)

    def read(self, name: str) -> bytes:
        """The bytes of a file; FileNotFoundError if it is not there."""
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name]


@dataclass
class Host:
    """One host: how many saves it has returned from, and what it did in the present one."""

    returned: int = 0
    history: list[tuple[Event, Any]] = field(default_factory=list)
    event: Event = END
    is_lost: bool = False


class Run:
    """Hosts that save one step after another, from what an earlier run has left."""

    def __init__(self, save: Callable[..., Any], num_hosts: int, files: Files, base: Loaded, run: int) -> None:
        self.save, self.num_hosts, self.files, self.base, self.run = save, num_hosts, dict(files), base, run
        self.hosts = [Host() for _ in range(num_hosts)]
        self.saves: list[tuple[int, list[bytes]]] = []
        self.log: list[str] = []
        self.lost, self.order, self.num_events = "no host is lost", "first", 0

    def go(self, num_saves: int, order: str) -> Iterator["Run"]:
        """Run all hosts to their end; yield the run as each loss leaves it, and at last this one."""
        self.start(num_saves, order)
        while ready := self._ready():
            yield from self._with_losses(self._choose(ready))
            self._perform(self._choose(ready))
        yield self

    def start(self, num_saves: int, order: str) -> None:
        """Bring every host to its first operation."""
        first = (self.base[0] if self.base else 0) + STRIDE
        steps = range(first, first + num_saves * STRIDE, STRIDE)
        self.saves = [(step, [shard(self.run, step, host) for host in range(self.num_hosts)]) for step in steps]
        self.order = order
        for number in range(self.num_hosts):
            self._advance(number)

    def finish(self) -> None:
        """Run all hosts until they have ended, or wait for one that is lost."""
        while ready := self._ready():
            self._perform(self._choose(ready))

    def _with_losses(self, number: int) -> Iterator["Run"]:
        """The runs that go on from here without a host, or without any."""
        writes = [each for each, host in enumerate(self.hosts) if host.event[0] == "write"]
        for who in ([number], list(range(self.num_hosts))):
            for in_the_middle in (False, True):
                if in_the_middle and not set(who) & set(writes):
                    continue
                other = copy(self)
                other.files, other.log = dict(self.files), self.log[-12:]
                other.hosts = [replace(host, history=list(host.history)) for host in self.hosts]
                other._lose(number, who, in_the_middle)
                other.finish()
                yield other

    def _ready(self) -> list[int]:
        """The hosts that can go on; where all wait for each other they go on first."""
        ready = self._not_waiting()
        return ready if ready or not self._meet() else self._ready()

    def _not_waiting(self) -> list[int]:
        return [n for n, host in enumerate(self.hosts) if not host.is_lost and host.event not in (BARRIER, END)]

    def _choose(self, ready: list[int]) -> int:
        """The first or last of the hosts that can go on, one after another, or at random by a seed."""
        if self.order in ("first", "last"):
            return ready[0 if self.order == "first" else -1]
        number = self.num_events if self.order == "in turn" else crc32(f"{self.order} {self.num_events}".encode()) >> 8
        return ready[number % len(ready)]

    def allowed(self) -> list[Loaded]:
        """What load may return now: the newest save from which all have returned, and any that all have begun since."""
        done = min(host.returned for host in self.hosts)
        begun = min(host.returned + bool(host.history) for host in self.hosts)
        return [self.base, *self.saves][done : begun + 1]

    @property
    def has_ended(self) -> bool:
        """Whether every host has returned from every save."""
        return all(host.returned == len(self.saves) for host in self.hosts)

    def _advance(self, number: int) -> None:
        """Run a host up to its next operation; a return leads into the next save."""
        host = self.hosts[number]
        while host.returned < len(self.saves):
            step, shards = self.saves[host.returned]
            storage = Storage(host.history)
            try:
                for _ in self.save(storage, number, self.num_hosts, step, shards[number]) or ():
                    storage.arrive()
            except Stop as stop:
                host.event = stop.event
                return
            except Flaw:
                raise
            except Exception as error:
                raised = f"save raised {type(error).__name__}: {error}"
                raise Flaw(f"{self.num_hosts} hosts, {self.lost}: host {number}'s {raised}{self.shown()}") from None
            host.returned, host.history = host.returned + 1, []
        host.event = END

    def _meet(self) -> bool:
        """Let all hosts go on from their barrier; False where nobody ever goes on."""
        if any(host.is_lost for host in self.hosts) or all(host.event == END for host in self.hosts):
            return False
        places = [(host.returned, sum(event == BARRIER for event, _ in host.history)) for host in self.hosts]
        if any(host.event == END for host in self.hosts) or len(set(places)) > 1:
            where = " and ".join(self._place(number, *place) for number, place in enumerate(places))
            raise Flaw(f"{self.num_hosts} hosts: {where}: every host needs the same number of yields{self.shown()}")
        self.log.append("all meet")
        for host in self.hosts:
            host.history.append((BARRIER, None))
        for number in range(self.num_hosts):
            self._advance(number)
        return True

    def _place(self, number: int, saved: int, met: int) -> str:
        if saved == len(self.saves):
            return f"host {number} has returned"
        return f"host {number} waits at yield {met + 1} of the save of step {self.saves[saved][0]}"

    def _perform(self, number: int) -> None:
        host = self.hosts[number]
        self.log.append(f"host {number} {_words(host.event)}")
        host.history.append((host.event, _done(self.files, host.event)))
        self.num_events += 1
        self._advance(number)

    def _lose(self, number: int, who: list[int], in_the_middle: bool) -> None:
        event, step = self.hosts[number].event, self.saves[self.hosts[number].returned][0]
        lost, whose = ("all hosts are", f"host {number}'s") if len(who) > 1 else (f"host {number} is", "its")
        moment = "in the middle of" if in_the_middle else "before"
        self.lost = f"{lost} lost {moment} {whose} {_words(event)} in the save of step {step}"
        for host in (self.hosts[each] for each in who):
            host.is_lost = True
            if in_the_middle and host.event[0] == "write":
                self.files[host.event[1]] = host.event[2][: len(host.event[2]) // 2]

    def shown(self) -> str:
        """The last operations, for a message."""
        return "\n  before that: " + (", ".join(self.log[-12:]) or "nothing")


def shard(run: int, step: int, host: int) -> bytes:
    """What a host saves; each run has bytes of its own."""
    return f"host {host} step {step} run {run} ".encode().ljust(SHARD_BYTES, b".")


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, got {type(name).__name__}")
    return name


def _refuse(data: Any) -> bytes:
    raise TypeError(f"a file takes bytes, got {type(data).__name__}; str.encode() makes them of text")


def _words(event: Event) -> str:
    return " ".join(
        ["barrier" if event == BARRIER else event[0], *event[1:2], *(event[2:] if event[0] == "rename" else ())]
    )


def _done(files: Files, event: Event) -> Any:
    """Do an operation and return its answer."""
    kind, *args = event
    if kind == "names":
        return sorted(files)
    if kind in ("read", "rename") and args[0] not in files:
        return FileNotFoundError(args[0])
    if kind == "read":
        return files[args[0]]
    if kind == "write":
        files[args[0]] = args[1]
    elif kind == "rename":
        files[args[1]] = files.pop(args[0])
    else:
        files.pop(args[0], None)
    return None


class Search:
    """All runs of a save and its load: first those with one loss, then those that go on from what it left."""

    def __init__(self, save: Callable[..., Any], load: Callable[..., Any]) -> None:
        self.save, self.load, self.num_runs = save, load, 0

    def all(self, num_hosts: int, orders: Sequence[str]) -> None:
        """Save on an empty storage and on one with a save, with each loss, and again on what is left; raises Flaw."""
        before = self.undisturbed(num_hosts, {}, None, 1, 3)
        left: dict[Any, tuple[Run, Loaded]] = {}
        for files, base in ((before.files, before.saves[-1]), ({}, None)):
            for order in orders:
                self.undisturbed(num_hosts, files, base, 2, 2, order)
                for run in Run(self.save, num_hosts, files, base, 2).go(2, order):
                    left.setdefault(tuple(sorted(run.files.items())), (run, self.judge(run)))
        for run, base in left.values():
            self.undisturbed(num_hosts, run.files, base, 3, 1, after=run)
        for place, (run, base) in enumerate(left.values()):
            for number, again in enumerate(Run(self.save, num_hosts, run.files, base, 3).go(1, "in turn")):
                if len(left) <= MANY or (place + number) % (len(left) // MANY + 1) == 0:
                    self.judge(again, after=run)

    def undisturbed(
        self, num_hosts: int, files: Files, base: Loaded, number: int, num_saves: int, order: str = "in turn",
        after: Run | None = None,
    ) -> Run:  # fmt: skip
        """A run without a loss, which is judged."""
        run = Run(self.save, num_hosts, files, base, number)
        run.start(num_saves, order)
        run.finish()
        self.judge(run, after)
        return run

    def judge(self, run: Run, after: Run | None = None) -> Loaded:
        """Load what a run has left, and raise Flaw unless that is what it may be."""
        self.num_runs += 1
        where = f"{run.num_hosts} hosts, " + (f"{after.lost}, the run starts again, and " if after else "") + run.lost
        found, allowed = self.loaded(run, where), run.allowed()
        if found not in allowed:
            expected = " or ".join(dict.fromkeys(_step(each) for each in reversed(allowed)))
            raise Flaw(
                f"{where}: load returned {_shards(found, run)}, expected {expected}{_why(found, run)}{run.shown()}"
            )
        held = sum(map(len, run.files.values()))
        if run.has_ended and held > BUDGET * SHARD_BYTES * run.num_hosts:
            times, names = held / (SHARD_BYTES * run.num_hosts), ", ".join(sorted(run.files))
            raise Flaw(f"{where}: the storage holds {times:.1f} times the bytes of a save, 2 may stay: {names}")
        return found

    def loaded(self, run: Run, where: str) -> Loaded:
        """What load returns of what a run has left."""
        try:
            value = self.load(Reader(dict(run.files)), run.num_hosts)
        except Exception as error:
            raise Flaw(f"{where}: load raised {type(error).__name__}: {error}{run.shown()}") from None
        if value is None:
            return None
        is_pair = isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], list | tuple)
        if not is_pair or type(step := plain(value[0])) is not int or not all(isinstance(x, bytes) for x in value[1]):
            raise Flaw(f"{where}: load returns (step, [bytes of each host]) or None, got {value!r:.80}")
        return step, list(value[1])


def _step(loaded: Loaded) -> str:
    return "None" if loaded is None else f"step {loaded[0]} whole"


def _shards(loaded: Loaded, run: Run) -> str:
    if loaded is None:
        return "None"
    step, shards = loaded
    return f"step {step} with [{', '.join(_shard(each, run) for each in shards)}]"


def _shard(data: bytes, run: Run) -> str:
    words = data.rstrip(b".").decode(errors="replace").split()
    if len(words) != 6 or not data.startswith(b"host "):
        return f"{len(data)} other bytes"
    earlier = " of the run before" if run.run > 1 and int(words[5]) == run.run - 1 else ""
    return ("" if len(data) == SHARD_BYTES else "half of ") + f"host {words[1]}'s of step {words[3]}{earlier}"


def _why(found: Loaded, run: Run) -> str:
    if found is None and run.base is None:
        return "; all hosts have returned, so it has to be found"
    if found is None:
        return "; the last complete save has to stay until the next one can be loaded"
    if any(len(data) != SHARD_BYTES for data in found[1]):
        return "; a file may be half written as long as its host has not come to a barrier"
    if len(found[1]) != run.num_hosts:
        return "; a shard of each host is needed"
    if len({data.rpartition(b"step")[2] for data in found[1]}) > 1:
        return "; these are shards of two saves"
    return "; all hosts had returned from a newer save" if found in [run.base, *run.saves] else ""


def flaw_of(save: Callable[..., Any], load: Callable[..., Any]) -> tuple[str, int]:
    """What is wrong with a save and its load, in words or "", and the number of runs."""
    found: tuple[str, int] = on_ranks(_search, 1, save, load, case="saving", seconds=SECONDS)[0]
    return found


def _search(rank: int, world_size: int, save: Callable[..., Any], load: Callable[..., Any]) -> tuple[str, int]:
    search = Search(save, load)
    try:
        search.all(2, ["in turn", "first", "last", *"abcd"])
        search.all(3, ["in turn", *"ab"])
    except Flaw as flaw:
        return str(flaw), search.num_runs
    return "", search.num_runs
