"""`join`: the ranks that a starter has started meet at a store and form one process group.

Chapter: book/appendix/gpus.  In: an `Environment`, a back end.  Out: an initialised default process group.
The store is `TCPStore` at MASTER_ADDR:MASTER_PORT, of torchrun's agent, or of rank 0 where no agent has one.
Without a choice GLOO takes the interface of the host's name, which many hosts resolve to loopback: one node then waits,
and the other one fails.
Elsewhere: `init_process_group("env://")`, which shares keys between restarts and has no message for a wrong interface;
NCCL takes `ib*`, else any but `docker*`, `lo` and `virbr*`, and NCCL_SOCKET_IFNAME chooses another.
"""

import atexit
import json
import os
import socket
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_lab.launch import accelerator, operating_system
from dualpipe_lab.launch.cluster.environment import Environment

if TYPE_CHECKING:
    from torch.distributed import Store

VARIABLE = "GLOO_SOCKET_IFNAME"
Addresses: TypeAlias = Mapping[str, Sequence[str]]  # by the name of an interface
Place: TypeAlias = tuple[str, int]  # address and port
CONNECT_SECONDS = 120.0  # of a meeting: ranks of other nodes may still be importing torch from a slow disk
OPERATION_SECONDS = 600.0  # for a collective or a message, then it fails; torch's own: NCCL 600, GLOO 1,800
_LONGEST_WAIT, _LONGEST_REACH_WAIT = 0.5, 0.2  # seconds between two looks at the store
PROBE_SECONDS = 5.0  # within which a host of one cluster answers
_BACKLOG = 1024  # ranks that connect at once; nobody accepts them
_LATER_SECONDS = 10.0  # by which rank 0 may have come later than another rank, and so say later who is missing

_joined: "tuple[Store, tuple[str, bool, float]] | None" = None  # as torch's default process group, of the process


def join(environment: Environment, backend: str, check: bool, seconds: float) -> None:
    """Make the default process group, unless an earlier launch or the script itself has made one that fits.

    Args:
        environment: of this rank.
        backend: `gloo`, or `nccl` for GLOO and NCCL together.
        check: torch compares every collective across the ranks; the caller has set torch's debug level.
        seconds: after which an operation of the group fails, on GLOO and on NCCL.

    Raises:
        ConnectionError: the ranks did not meet, or GLOO could not connect them.
        ValueError: no network interface can reach the other nodes.
    """
    global _joined  # beside torch's own
    import torch.distributed as dist

    wanted = backend, check, seconds
    if dist.is_initialized():
        if _joined is None or _joined[1] == wanted:  # None: the script's own group
            return
        leave()
    deadline = time.monotonic() + min(seconds, CONNECT_SECONDS)
    chosen = _interface(environment, deadline)
    store = _joined[0] if _joined else _connect(environment, chosen, deadline)
    _initialise(environment, backend, store, chosen, deadline, timedelta(seconds=seconds))
    _joined = store, wanted
    atexit.register(leave)


def leave() -> None:
    """End the groups' threads before the interpreter ends: a thread that is left then may abort the process."""
    import torch.distributed as dist

    atexit.unregister(leave)
    if dist.is_initialized():
        dist.destroy_process_group()


def stay() -> None:
    """Do not leave at exit: after an error, a message that nobody answers would keep the groups' threads alive."""
    atexit.unregister(leave)


# ---- the interface


@dataclass(frozen=True)
class Interface:
    """The network interface of GLOO: its name, its first address, and a note if the choice is unusual."""

    name: str
    address: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def route(host: str, port: int) -> str:
    """Return the local address from which this host would send to another one: a connected UDP socket sends nothing.

    Raises:
        OSError: the name is unknown (`socket.gaierror`), or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        local: str = probe.getsockname()[0]
    return local


def choose(environment: Environment, addresses: Addresses, source: str, wanted: str | None = None) -> Interface:
    """Return the interface for GLOO: loopback on one machine, between nodes that of the route to MASTER_ADDR.

    Args:
        environment: of this rank.
        addresses: of this host's interfaces that are up.
        source: the local address of the route to `MASTER_ADDR`, from `route`.
        wanted: the user's GLOO_SOCKET_IFNAME, if it is set.

    Raises:
        ValueError: no interface can reach the other nodes; the candidates are named.
    """
    local = source.partition("%")[0]
    if wanted:
        return _checked(environment, addresses, local, wanted)
    if environment.is_one_machine:
        loopback = next((name for name, found in addresses.items() if _is_loopback(found[0])), None)
        if loopback is not None:
            return Interface(loopback, addresses[loopback][0])
    elif _is_loopback(local) and environment.num_nodes is not None:
        return _only_candidate(environment, addresses, source)
    for name, found in addresses.items():
        if local in _plain(found):
            return Interface(name, local)
    raise ValueError(
        f"the route to MASTER_ADDR={environment.master_addr} leaves from {local}, which is the address of no interface "
        f"that is up here; it has {candidates(addresses)}; set {VARIABLE} to the one that reaches the other nodes"
    )


def candidates(addresses: Addresses) -> str:
    """The interfaces that may reach another node, with their addresses, as a text."""
    outside = [f"{name} ({found[0]})" for name, found in addresses.items() if not _is_loopback(found[0])]
    return ", ".join(outside) or "none but loopback"


def _checked(environment: Environment, addresses: Addresses, local: str, wanted: str) -> Interface:
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in addresses:
            raise ValueError(
                f"{VARIABLE}={wanted} names {name!r}, which is no interface with an address on this host; "
                f"it has {candidates(addresses)}; set one of them, or unset the variable"
            )
        if not environment.is_one_machine and (environment.num_nodes or 1) > 1 and _is_loopback(addresses[name][0]):
            raise ValueError(
                f"{VARIABLE}={wanted} names loopback, which reaches no other of the {environment.num_nodes} nodes; "
                f"set one of {candidates(addresses)}, or unset the variable"
            )
    note = ""
    if not environment.is_one_machine and not any(local in _plain(addresses[name]) for name in names):
        note = f"{VARIABLE}={wanted} is kept; the route to {environment.master_addr} leaves from {local}"
    return Interface(wanted, addresses[names[0]][0], note)


def _only_candidate(environment: Environment, addresses: Addresses, source: str) -> Interface:
    """The one other interface of rank 0's node, where that host takes `MASTER_ADDR` for its own loopback."""
    where = f"MASTER_ADDR={environment.master_addr} is {source} on node {environment.node}"
    if environment.node != 0 or environment.master_addr == "localhost" or _is_loopback(environment.master_addr):
        raise ValueError(
            f"{where}, which is this node itself, and {environment.num_nodes} nodes meet there; give torchrun an "
            "address of node 0 that the others reach (--master-addr, or --rdzv-endpoint and --local-addr)"
        )
    outside = [(name, found[0]) for name, found in addresses.items() if not _is_loopback(found[0])]
    if len(outside) != 1:
        raise ValueError(
            f"{where}, so no route says which interface reaches the other nodes, and it has {candidates(addresses)}; "
            f"set {VARIABLE} to the right one, or MASTER_ADDR to an address"
        )
    ((name, address),) = outside
    return Interface(name, address, f"{where}; {name} is taken, the only interface to other nodes")


def _plain(addresses: Sequence[str]) -> list[str]:
    return [address.partition("%")[0] for address in addresses]


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def _interface(environment: Environment, deadline: float) -> Interface:
    """Choose the interface, and tell GLOO; a name that the network does not know yet is asked for again."""
    source, problem = "", OSError()
    for _ in _looks(deadline):
        try:
            source = route(environment.master_addr, environment.master_port)
            break
        except OSError as error:
            problem = error
            if not isinstance(error, socket.gaierror):
                break
    addresses = operating_system.interface_addresses()
    if not source:
        raise ConnectionError(
            f"{environment}: this host does not reach MASTER_ADDR={environment.master_addr} ({problem}); its "
            f"interfaces are {candidates(addresses)}; give an address of the node of rank 0"
        )
    chosen = choose(environment, addresses, source, os.environ.get(VARIABLE))
    if chosen.note:
        warnings.warn(chosen.note, stacklevel=2)
    os.environ[VARIABLE] = chosen.name
    return chosen


# ---- the meeting


def _connect(environment: Environment, chosen: Interface, deadline: float) -> "Store":
    import torch.distributed as dist

    host, port = environment.master_addr, environment.master_port
    hosts = environment.rank == 0 and not environment.agent_hosts_store
    limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        return dist.TCPStore(host, port, is_master=hosts, timeout=limit, wait_for_workers=False, multi_tenant=True)
    except Exception as error:
        does, remedy = "reaches nobody at", "start rank 0, and let its port through the firewall of its node"
        if hosts:
            does, remedy = "cannot listen at", "choose a free MASTER_PORT"
        raise ConnectionError(
            f"{environment}: {does} {_where(environment)} from {chosen}; {remedy}; {_said(error)}"
        ) from None


def _initialise(
    environment: Environment,
    backend: str,
    store: "Store",
    chosen: Interface,
    deadline: float,
    limit: timedelta,
) -> None:
    """Agree on a generation and connect the ranks under its prefix; `limit`: of an operation."""
    import torch.distributed as dist

    meeting = dist.PrefixStore("dualpipe_lab", store)
    with _rendezvous_of(environment), listener(chosen.address) as door:
        place = chosen.address, int(door.getsockname()[1])
        generation, places = agree(meeting, environment, place, deadline)
        problem = check_reach(meeting, generation, environment.rank, places, deadline)
    if problem:
        raise ConnectionError(_unconnected(environment, chosen, problem))
    accelerator.start(backend, environment.local_rank)
    try:
        dist.init_process_group(
            accelerator.group_backends(backend),
            # an agent keeps its store over a restart, and with it the addresses of ranks that have ended
            store=dist.PrefixStore(f"generation-{generation}", meeting),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=limit,
        )
    except Exception as error:
        raise ConnectionError(_unconnected(environment, chosen, _said(error))) from None
    store.set_timeout(limit)  # of groups that are made later


@contextmanager
def _rendezvous_of(environment: Environment) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own classes for the store's errors are RuntimeErrors
        raise ConnectionError(
            f"{environment}: the rendezvous at {environment.master_addr}:{environment.master_port} is gone: its "
            f"process has ended, or its host answers nothing; see what its node prints; {_said(error)}"
        ) from None


def _unconnected(environment: Environment, chosen: Interface, problem: str) -> str:
    found = candidates(operating_system.interface_addresses())
    return (
        f"{environment}: the ranks met at {environment.master_addr}:{environment.master_port}, but GLOO cannot connect "
        f"them: {problem}; this rank uses {chosen}, its host has {found}; set {VARIABLE} on every node to "
        "the interface that reaches the others, and let all ports between the nodes through, as GLOO listens on ports "
        "that the kernel chooses"
    )


def agree(meeting: "Store", environment: Environment, place: Place, deadline: float) -> tuple[int, list[Place]]:
    """Wait until all ranks of one start are here; return the generation and the place of each rank.

    A generation is a number for each time that a whole world meets: rank 0 opens it, every other rank answers with a
    token, and rank 0 closes it with all tokens.  A rank whose token is not among them has read an older one, and waits.

    Args:
        meeting: the store; keys of earlier starts may be in it.
        environment: of this rank.
        place: where this rank listens.
        deadline: in seconds of `time.monotonic`.

    Raises:
        ConnectionError: ranks are missing at the deadline.
        ValueError: the ranks do not agree on the number of ranks or of ranks per node.
    """
    per_node = environment.ranks_per_node if environment.has_equal_nodes else None
    answer = [uuid.uuid4().hex, list(place), environment.world_size, per_node]
    part = _open if environment.rank == 0 else _enter
    generation, closing = part(meeting, environment, answer, deadline)
    if closing["problem"]:
        raise (ConnectionError if closing["is_missing"] else ValueError)(closing["problem"])
    return generation, [(address, port) for address, port in closing["places"]]


def _open(
    meeting: "Store", environment: Environment, answer: list[object], deadline: float
) -> tuple[int, dict[str, Any]]:
    """Rank 0: open a generation, wait for all answers, and close it with them."""
    generation = meeting.add("generations", 1)
    meeting.set("open", str(generation))
    keys = {rank: f"{generation}/{rank}" for rank in range(1, environment.world_size)}
    for _ in _looks(deadline):
        if not keys or meeting.check(list(keys.values())):
            break
    answers = {0: answer} | {rank: json.loads(meeting.get(key)) for rank, key in keys.items() if meeting.check([key])}
    missing = [rank for rank in keys if rank not in answers]
    closing = {
        "tokens": {rank: token for rank, (token, *_) in answers.items()},
        "places": [place for _, place, *_ in answers.values()],
        "problem": _missing(environment, missing) if missing else _disagreement(answers),
        "is_missing": bool(missing),
    }
    meeting.set(f"{generation}/closed", json.dumps(closing))
    return generation, closing


def _enter(
    meeting: "Store", environment: Environment, answer: list[object], deadline: float
) -> tuple[int, dict[str, Any]]:
    """Another rank: answer the generation that is open, and wait until one is closed with this answer."""
    rank, answered, is_open = environment.rank, "", False
    for _ in _looks(deadline + _LATER_SECONDS):
        generation = meeting.get("open").decode() if meeting.check(["open"]) else ""
        if generation and generation != answered:
            meeting.set(f"{generation}/{rank}", json.dumps(answer))
            answered = generation
        is_open = answered != "" and not meeting.check([f"{answered}/closed"])
        if answered and not is_open:
            closing = json.loads(meeting.get(f"{answered}/closed"))
            if closing["tokens"].get(str(rank)) == answer[0]:
                return int(answered), closing
        if not is_open and time.monotonic() > deadline + _LONGEST_WAIT:
            break
    did = "came to {}, and does not say who is missing" if is_open else "did not come to {}"
    raise ConnectionError(f"{environment}: rank 0 {did.format(_where(environment))}; see what its node prints")


def _looks(deadline: float, longest: float = _LONGEST_WAIT) -> Iterator[None]:
    """Yield until the deadline, ever more rarely; a wait in the store itself would hold up signals."""
    wait = 0.01
    yield
    while time.monotonic() < deadline:
        time.sleep(wait)
        wait = min(1.5 * wait, longest)
        yield


def _missing(environment: Environment, missing: list[int]) -> str:
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"{len(missing)} of {environment.world_size} ranks did not come to {_where(environment)}: {listed}; start them "
        "with the same address and port, and see what their nodes print"
    )


def _disagreement(answers: dict[int, list[object]]) -> str:
    """What ranks of one world must agree on, and do not; empty if all is well."""
    for name, index, remedy in (
        ("ranks of the world", 2, "start all nodes with the same sizes"),
        ("ranks per node", 3, "start equally many ranks on every node, with consecutive numbers"),
    ):
        found = {rank: answer[index] for rank, answer in answers.items()}
        other = next((rank for rank, value in found.items() if value != found[0]), None)
        if other is not None:
            said = [f"{'unequal numbers' if found[rank] is None else found[rank]} (rank {rank})" for rank in (0, other)]
            return f"the nodes were started with different numbers of {name}: {' and '.join(said)}; {remedy}"
    return ""


def listener(address: str) -> socket.socket:
    """Return a socket on which this rank listens, at a port that the kernel chooses, until all have connected."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def check_reach(meeting: "Store", generation: int, rank: int, places: Sequence[Place], deadline: float) -> str:
    """Connect to one rank of every other address, and wait until all ranks have; return what went wrong, or nothing.

    GLOO tries four times, for the whole timeout each, before it says that it cannot connect, and then not to whom.
    """
    if problem := _first_problem(rank, places):
        meeting.set(f"{generation}/unreached", problem)
    meeting.add(f"{generation}/reached", 1)
    num_reached = 0
    for _ in _looks(deadline + PROBE_SECONDS, _LONGEST_REACH_WAIT):
        num_reached = meeting.add(f"{generation}/reached", 0)
        if meeting.check([f"{generation}/unreached"]):
            return str(meeting.get(f"{generation}/unreached"), "utf-8")
        if num_reached >= len(places):
            return ""
    return f"{len(places) - num_reached} of {len(places)} ranks have not tried to reach the others in time"


def _first_problem(rank: int, places: Sequence[Place]) -> str:
    own, _ = places[rank]
    others = {address: (other, port) for other, (address, port) in enumerate(places) if address != own}
    for address, (other, port) in others.items():
        try:
            socket.create_connection((address, port), timeout=PROBE_SECONDS, source_address=(own, 0)).close()
        except OSError as error:
            return f"rank {rank} at {own} does not reach rank {other} at {address} ({error})"
    return ""


def _where(environment: Environment) -> str:
    return f"{environment.master_addr}:{environment.master_port} (MASTER_ADDR, MASTER_PORT)"


def _said(error: BaseException) -> str:
    return "torch says: " + str(error).strip().partition("\n")[0][:300]
