"""How ranks meet: generations over one store, ranks that are missing, addresses where nobody listens."""

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from dualpipe_lab.launch.cluster import join as join_module
from dualpipe_lab.launch.cluster.environment import Environment
from dualpipe_lab.launch.cluster.join import agree, check_reach, join, listener

WORLD = [Environment(rank, 3, 0, 1, rank, 3, "192.0.2.10", 29500) for rank in range(3)]


def meet(store, members, seconds=20.0):
    """Let these ranks agree at the same time; return what each returned or raised."""

    def enter(member):
        try:
            return agree(store, member, (f"192.0.2.{10 + member.rank}", member.rank), time.monotonic() + seconds)
        except (ConnectionError, ValueError) as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(enter, members))


def test_each_start_over_a_store_gets_one_generation_and_all_places():
    everyone, store = [("192.0.2.10", 0), ("192.0.2.11", 1), ("192.0.2.12", 2)], HashStore()
    assert [meet(store, WORLD) for _ in range(3)] == [[(generation, everyone)] * 3 for generation in (1, 2, 3)]
    assert meet(HashStore(), [replace(WORLD[0], world_size=1, num_nodes=1)]) == [(1, everyone[:1])]


def test_a_rank_that_is_early_does_not_take_the_closed_generation_for_its_own():
    """After a restart the other ranks may look at the store before the new rank 0 has opened a generation."""
    store = HashStore()
    meet(store, WORLD)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meet, store, WORLD[1:])
        while not store.check(["1/1"]) or json.loads(store.get("1/1"))[0] in str(store.get("1/closed")):
            time.sleep(0.01)  # until it has answered the old generation
        late = meet(store, WORLD[:1])
        assert [generation for generation, _ in late + early.result()] == [2, 2, 2]


def test_an_unfinished_start_leaves_nothing_that_holds_up_the_next():
    store = HashStore()
    (first,) = meet(store, WORLD[:1], seconds=0.1)
    assert "2 of 3 ranks did not come to 192.0.2.10:29500 (MASTER_ADDR, MASTER_PORT): 1, 2; start them" in str(first)
    assert [generation for generation, _ in meet(store, WORLD)] == [2, 2, 2]


def test_a_rank_that_came_before_rank_0_hears_from_it_who_did_not():
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meet, store, WORLD[1:2], 1.0)
        time.sleep(0.5)
        found = meet(store, WORLD[:1], 2.5) + early.result()
    assert {str(error).partition(":29500")[0] for error in found} == {"1 of 3 ranks did not come to 192.0.2.10"}


def test_a_rank_0_that_is_lost_after_it_came_is_not_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(join_module, "_LATER_SECONDS", 0.3)
    store = HashStore()
    store.set("open", "1")
    (error,) = meet(store, WORLD[1:2], 0.3)
    assert "rank 0 came to 192.0.2.10:29500" in str(error)
    assert "and does not say who is missing; see what its node prints" in str(error)


def test_a_store_that_ends_while_the_ranks_meet_is_told(monkeypatch):
    monkeypatch.setenv(join_module.VARIABLE, "")  # and remove the choice at the end
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = f"from torch.distributed import TCPStore\nTCPStore('127.0.0.1', {port}, is_master=True).wait(['end'])"
    with subprocess.Popen([sys.executable, "-c", code]) as server, ThreadPoolExecutor(1) as pool:
        member = Environment(1, 2, 0, 1, 1, 2, "127.0.0.1", port, agent_hosts_store=True, nodes_on_one_machine=True)
        joining = pool.submit(join, member, "gloo", False, seconds=60)
        watched = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        watched.set("dualpipe_lab/open", "1")
        watched.wait(["dualpipe_lab/1/1"], timedelta(seconds=60))  # the rank has answered, and looks again and again
        server.kill()
        with pytest.raises(
            ConnectionError, match=rf"the rendezvous at 127.0.0.1:{port} is gone: its process has ended"
        ):
            joining.result(120)


def test_without_rank_0_the_others_give_up():
    began = time.monotonic()
    found = meet(HashStore(), WORLD[1:], seconds=0.5)
    assert all("rank 0 did not come to 192.0.2.10:29500" in str(error) for error in found)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 4, "num_nodes": 4}, r"ranks of the world: 3 \(rank 0\) and 4 \(rank 2\); start all nodes"),
        ({"ranks_per_node": 2}, r"ranks per node: 1 \(rank 0\) and unequal numbers \(rank 2\); start equally many"),
    ],
)
def test_nodes_that_were_started_differently_are_refused_on_every_rank(change, message):
    for error in meet(HashStore(), [*WORLD[:2], replace(WORLD[2], **change)]):
        with pytest.raises(ValueError, match=message):
            raise error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {},
            r"rank 1 of 2 on node 0 of 1, started by .*: reaches nobody at 127.0.0.1:9 .* from lo\d? \(127.0.0.1\); st",
        ),
        ({"rank": 0, "local_rank": 0}, r"cannot listen at 127.0.0.1:9 .*; choose a free MASTER_PORT"),
        (
            {"master_addr": "no-such-host.invalid"},
            r"does not reach MASTER_ADDR=no-such-host.invalid .*its interfaces a",
        ),
    ],
)
def test_a_rendezvous_that_is_not_there_is_told_in_bounded_time(monkeypatch, change, message):
    monkeypatch.setenv(join_module.VARIABLE, "")  # and remove the choice at the end
    if "rank" in change:  # another process has the port
        monkeypatch.setattr("torch.distributed.TCPStore", taken)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=message):
        join(replace(Environment(1, 2, 1, 2, 0, 1, "127.0.0.1", 9), **change), "gloo", False, seconds=1)
    assert time.monotonic() - began < 30


def taken(*arguments, **options):
    raise RuntimeError("The server socket has failed to listen on any local network address.")


# ---- reaching each other; 127.0.0.2 is another address of loopback, as that of another node


def reach(places, seconds=5.0):
    store, deadline = HashStore(), time.monotonic() + seconds
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(lambda rank: check_reach(store, 1, rank, places, deadline), range(len(places))))


@pytest.mark.skipif(sys.platform != "linux", reason="loopback has a single address elsewhere")
def test_ranks_that_reach_each_other_have_no_problem_and_one_that_does_not_is_told_to_all():
    with listener("127.0.0.1") as first, listener("127.0.0.2") as second:
        places = [("127.0.0.1", first.getsockname()[1]), ("127.0.0.2", second.getsockname()[1])]
        assert reach(places) == ["", ""]
    found = reach([places[0], ("127.0.0.2", 9)])
    assert all("does not reach rank" in problem for problem in found)
    with listener("127.0.0.1") as first:
        found = reach([("127.0.0.1", first.getsockname()[1]), ("127.0.0.2", 9)])
    assert found == ["rank 0 at 127.0.0.1 does not reach rank 1 at 127.0.0.2 ([Errno 111] Connection refused)"] * 2


def test_ranks_at_one_address_are_not_asked_to_reach_each_other():
    assert reach([("127.0.0.1", 9)] * 3) == ["", "", ""]


def test_a_rank_that_does_not_try_is_waited_for_in_bounded_time(monkeypatch):
    monkeypatch.setattr(join_module, "PROBE_SECONDS", 0.3)
    found = check_reach(HashStore(), 1, 0, [("127.0.0.1", 9)] * 2, time.monotonic())
    assert found == "1 of 2 ranks have not tried to reach the others in time"
