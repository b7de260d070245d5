"""Which interface GLOO listens on: by the route, by the user, or refused with the candidates."""

import socket
from dataclasses import replace

import psutil
import pytest

from dualpipe_lab.launch import operating_system
from dualpipe_lab.launch.cluster.environment import Environment
from dualpipe_lab.launch.cluster.join import candidates, choose, route

NODE_0 = Environment(0, 4, 0, 2, 0, 2, "192.0.2.10", 29500)
NODE_1 = replace(NODE_0, rank=2, node=1)
ALONE = replace(NODE_0, world_size=2, num_nodes=1)
UNKNOWN = replace(NODE_0, node=None, num_nodes=None, ranks_per_node=None)
HOST = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.0.2.10", "2001:db8::10"], "ib0": ["198.51.100.10"]}


NAMED = replace(NODE_0, master_addr="gpu0")  # Debian writes a host's own name beside 127.0.1.1 into /etc/hosts
KEPT = "GLOO_SOCKET_IFNAME=ib0 is kept; the route to 192.0.2.10 leaves from 192.0.2.10"
CHOSEN = [  # environment, interfaces, the route's source, the user's wish; the interface, and the end of its note
    (NODE_0, HOST, "192.0.2.10", None, "eth0 (192.0.2.10)", ""),
    (NODE_1, HOST, "198.51.100.10", None, "ib0 (198.51.100.10)", ""),
    (NODE_1, HOST, "2001:db8::10%eth0", None, "eth0 (2001:db8::10)", ""),
    (ALONE, HOST, "127.0.0.1", None, "lo (127.0.0.1)", ""),
    (ALONE, HOST, "192.0.2.10", None, "lo (127.0.0.1)", ""),  # however its host is called
    (ALONE, {"eth0": ["192.0.2.10"]}, "192.0.2.10", None, "eth0 (192.0.2.10)", ""),  # a container without loopback
    (UNKNOWN, HOST, "127.0.0.1", None, "lo (127.0.0.1)", ""),
    (UNKNOWN, HOST, "198.51.100.10", None, "ib0 (198.51.100.10)", ""),
    (NODE_1, HOST, "192.0.2.10", "eth0", "eth0 (192.0.2.10)", ""),
    (NODE_1, HOST, "192.0.2.10", "ib0", "ib0 (198.51.100.10)", KEPT),
    (NODE_1, HOST, "192.0.2.10", "ib0,eth0", "ib0,eth0 (198.51.100.10)", ""),
    (ALONE, HOST, "127.0.0.1", "eth0", "eth0 (192.0.2.10)", ""),
    (NAMED, {"lo": HOST["lo"], "eth0": ["192.0.2.10"]}, "127.0.1.1", None, "eth0 (192.0.2.10)", "eth0 is taken"),
]


def test_the_route_says_the_interface_and_the_user_s_own_is_kept():
    """A host that takes its own name for loopback uses its only other interface."""
    for environment, addresses, source, wanted, interface, note in CHOSEN:
        found = choose(environment, addresses, source, wanted)
        assert str(found) == interface
        assert note in found.note
        assert bool(note) == bool(found.note)


WRONG = [
    (NODE_1, "192.0.2.10", "eth7", r"names 'eth7', which is no interface .* has eth0 \(192.0.2.10\), ib0 \(198.51"),
    (
        NODE_1,
        "192.0.2.10",
        "lo",
        r"names loopback, which reaches no other of the 2 nodes; set one of eth0 \(192.0.2.10",
    ),
    (NODE_0, "127.0.1.1", None, r"no route says which .* has eth0 .*, ib0 .*; set GLOO_SOCKET_IFNAME to the right one"),
    (NODE_1, "127.0.1.1", None, "is 127.0.1.1 on node 1, which is this node itself, and 2 nodes meet there"),
    (
        replace(NODE_0, master_addr="localhost"),
        "127.0.0.1",
        None,
        "MASTER_ADDR=localhost is 127.0.0.1 on node 0, which",
    ),
    (NODE_1, "203.0.113.1", None, r"leaves from 203.0.113.1, which is the address of no interface that is up here; it"),
]


def test_what_cannot_reach_the_other_nodes_is_refused():
    for environment, source, wanted, message in WRONG:
        with pytest.raises(ValueError, match=message):
            choose(environment, HOST, source, wanted)


def test_a_host_without_other_interfaces_says_so():
    assert candidates({"lo": ["127.0.0.1"]}) == "none but loopback"


# ---- this machine


def test_the_interfaces_of_this_host_are_those_that_psutil_sees():
    families = (socket.AF_INET, socket.AF_INET6)
    running = {name for name, found in psutil.net_if_stats().items() if "running" in found.flags.split(",")}
    seen = {
        name: sorted(entry.address.partition("%")[0] for entry in entries if entry.family in families)
        for name, entries in psutil.net_if_addrs().items()
        if name in running
    }
    assert {name: sorted(found) for name, found in operating_system.interface_addresses().items()} == {
        name: found for name, found in seen.items() if found
    }


def test_the_route_to_an_address_of_this_host_begins_at_that_address():
    assert route("127.0.0.1", 29500) == "127.0.0.1"
    for addresses in operating_system.interface_addresses().values():
        address = addresses[0]
        assert "." not in address or route(address, 29500) == address


def test_an_unknown_host_is_an_error_at_once():
    with pytest.raises(socket.gaierror):
        route("no-such-host.invalid", 29500)
