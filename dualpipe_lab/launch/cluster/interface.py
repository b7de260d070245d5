"""`Interface`: the network interface over which GLOO connects the ranks.

Chapter: book/appendix/gpus.  In: where the ranks meet, the addresses of this host.  Out: a name for GLOO_SOCKET_IFNAME.
  one machine     loopback: one node, or several that `emulated_hosts` has made without a network of their own
  several nodes   the interface by which the kernel would send to MASTER_ADDR: the local address of a connected UDP
                  socket, which sends nothing, is the address of that interface
  set by the user kept, if it exists and can reach another node
Without a choice GLOO takes the interface of the host's name, which many hosts resolve to loopback: one node then waits,
and the other one fails.
Elsewhere: NCCL takes `ib*`, else any but `docker*`, `lo` and `virbr*`; NCCL_SOCKET_IFNAME chooses another.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeAlias

from dualpipe_lab.launch.cluster.environment import Environment

VARIABLE = "GLOO_SOCKET_IFNAME"
Addresses: TypeAlias = Mapping[str, Sequence[str]]  # by the name of an interface


@dataclass(frozen=True)
class Interface:
    """What GLOO listens on.

    Attributes:
        name: for GLOO_SOCKET_IFNAME; several of them with commas between.
        address: of the first one.
        note: what is unusual about it; empty if nothing is.
    """

    name: str
    address: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def route(host: str, port: int) -> str:
    """Return the local address from which this host would send to another one; nothing is sent.

    Raises:
        OSError: the name is unknown (`socket.gaierror`), or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        local: str = probe.getsockname()[0]
    return local


def choose(environment: Environment, addresses: Addresses, source: str, wanted: str | None = None) -> Interface:
    """Return the interface for GLOO.

    Args:
        environment: of this rank.
        addresses: of this host's interfaces that are up.
        source: the local address of the route to `MASTER_ADDR`, from `route`.
        wanted: the user's GLOO_SOCKET_IFNAME, if it is set.

    Raises:
        ValueError: no interface can reach the other nodes; the candidates are named.
    """
    if wanted:
        return _checked(environment, addresses, source, wanted)
    if environment.is_one_machine:
        name = next((name for name in addresses if _is_loopback(addresses[name][0])), None)
        return _owner(environment, addresses, source) if name is None else Interface(name, addresses[name][0])
    if _is_loopback(source) and environment.num_nodes is not None:
        return _only_candidate(environment, addresses, source)
    return _owner(environment, addresses, source)


def candidates(addresses: Addresses) -> str:
    """The interfaces that may reach another node, with their addresses, as a text."""
    outside = [f"{name} ({found[0]})" for name, found in addresses.items() if not _is_loopback(found[0])]
    return ", ".join(outside) or "none but loopback"


def _checked(environment: Environment, addresses: Addresses, source: str, wanted: str) -> Interface:
    """The user's interfaces, if they can be right."""
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
    local, note = source.partition("%")[0], ""
    if not environment.is_one_machine and not any(local in _plain(addresses[name]) for name in names):
        note = f"{VARIABLE}={wanted} is kept; the route to {environment.master_addr} leaves from {local}"
    return Interface(wanted, addresses[names[0]][0], note)


def _only_candidate(environment: Environment, addresses: Addresses, source: str) -> Interface:
    """Where this host takes `MASTER_ADDR` for its own loopback: the one other interface, on the node of rank 0."""
    where = f"MASTER_ADDR={environment.master_addr} is {source} on node {environment.node}"
    if environment.node != 0 or environment.master_addr == "localhost" or _is_loopback(environment.master_addr):
        raise ValueError(
            f"{where}, which is this node itself, and {environment.num_nodes} nodes meet there; give torchrun an "
            "address of node 0 that the others reach (--master-addr, or --rdzv-endpoint and --local-addr)"
        )
    outside = {name: found for name, found in addresses.items() if not _is_loopback(found[0])}
    if len(outside) != 1:
        raise ValueError(
            f"{where}, so no route says which interface reaches the other nodes, and it has {candidates(addresses)}; "
            f"set {VARIABLE} to the right one, or MASTER_ADDR to an address"
        )
    ((name, found),) = outside.items()
    return Interface(name, found[0], f"{where}; {name} is taken, the only interface to other nodes")


def _owner(environment: Environment, addresses: Addresses, source: str) -> Interface:
    """The interface with the address from which the kernel would send."""
    local = source.partition("%")[0]
    for name, found in addresses.items():
        if local in _plain(found):
            return Interface(name, local)
    raise ValueError(
        f"the route to MASTER_ADDR={environment.master_addr} leaves from {local}, which is the address of no interface "
        f"that is up here; it has {candidates(addresses)}; set {VARIABLE} to the one that reaches the other nodes"
    )


def _plain(addresses: Sequence[str]) -> list[str]:
    return [address.partition("%")[0] for address in addresses]


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False
