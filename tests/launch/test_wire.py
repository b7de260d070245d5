"""Bytes on the wire beside the derived ones: all collectives, who is charged, small tensors, no Linux."""

import sys

import pytest
import torch
from collectives import every_collective

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.comm.groups import carrier
from dualpipe_lab.launch import operating_system
from dualpipe_lab.launch.record import wire
from dualpipe_lab.launch.record.ledger import Ledger, RankLedger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the wire is read from Linux")
NUMEL = 12 * 2**16  # of float32, 3 MiB: GLOO's headers are less than 0.1% of it, and 2, 3 and 4 ranks divide it


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_leaves_the_sockets_is_what_was_derived(num_ranks):
    ledger = lab.launch(every_collective, num_ranks, NUMEL, wire=True, timeout=120).ledger
    for rank, own in enumerate(ledger.ranks):
        assert set(own.entries) == {*wire.KINDS, "irecv"}
        assert all(sum(entry.sent_to.values()) == entry.sent for entry in own.entries.values())
        assert all(rank not in entry.sent_to for entry in own.entries.values())
        for name, entry in own.entries.items():
            if name != "irecv":
                assert abs(entry.wire - entry.sent) < 0.001 * 4 * NUMEL, (rank, name, entry)
                if name != "barrier":
                    assert ledger.on_the_wire(name, rank) == pytest.approx(ledger.derived(name, rank), abs=0.011)


def test_torchs_own_reduce_scatter_would_send_twice_as_much():
    """Why `comm` has its own on GLOO; when this fails, torch has got one, and facts and pages must say so."""
    import torch.distributed as dist

    def fn(rank, world_size):
        x = torch.ones(NUMEL)
        group = carrier("reduce_scatter_single", tuple(range(world_size)), "", None)
        dist.reduce_scatter_single(torch.empty(NUMEL // 4), x, group=group)
        comm.reduce_scatter_single(torch.empty(1), x[:4])  # so that the ledger has a row

    ledger = lab.launch(fn, 4, wire=True).ledger
    for own in ledger.ranks:
        assert own.entries["reduce_scatter_single"].wire == pytest.approx(1.5 * 4 * NUMEL, rel=0.001)


def test_what_overlaps_and_what_is_never_waited_for_is_charged_to_its_own_operation():
    def fn(rank, world_size):
        x = torch.ones(NUMEL)
        pair = comm.new_group([2 * (rank // 2), 2 * (rank // 2) + 1], members_only=True)
        works = [
            comm.isend(x, rank ^ 2),
            comm.all_reduce(x.clone(), async_op=True),
            comm.reduce_scatter_single(torch.empty(NUMEL // 2), x, group=pair, async_op=True),
            comm.all_reduce(x.clone(), group=pair, async_op=True),
        ]
        comm.recv(torch.empty(NUMEL), rank ^ 2)
        for work in works[1:]:
            work.wait()

    ledger = lab.launch(fn, 4, wire=True, clock="virtual").ledger
    for rank in range(4):
        assert ledger.on_the_wire("isend", rank) == 1
        assert ledger.on_the_wire("all_reduce", rank) == 1.25  # 1.5 among four, 1 among two
        assert ledger.on_the_wire("reduce_scatter_single", rank) == 0.5
        assert (
            ledger.on_the_wire(rank=rank, tensor_bytes=4 * NUMEL)
            == 4
            == ledger.derived(rank=rank, tensor_bytes=4 * NUMEL)
        )


def test_small_tensors_leave_the_column_empty_and_the_ledger_says_so():
    def fn(rank, world_size):
        comm.all_reduce(torch.ones(2**20))
        comm.broadcast(torch.ones(2**18 - 1), 0)

    ledger = lab.launch(fn, 2, wire=True).ledger
    assert ledger.on_the_wire("broadcast", 0) is None
    assert ledger.on_the_wire("all_reduce", 0) == 1
    lines = str(ledger).splitlines()
    assert lines[0].endswith("derived (tensors)  on the wire (tensors)")
    assert lines[1].endswith("1.00                   1.00")
    assert lines[2].endswith("1,048,572             0  1")
    assert lines[-1] == "on the wire: empty for tensors of less than 1 MiB"
    assert "<caption>on the wire: empty" in ledger._repr_html_()


def test_one_rank_is_shown_in_multiples_of_a_tensor():
    def fn(rank, world_size):
        x = torch.ones(2**19)
        for _ in range(3):
            comm.reduce_scatter_single(torch.empty(2**18), x)
        comm.all_reduce(torch.ones(1))

    ledger = lab.launch(fn, 2, wire=True).ledger
    assert ledger.beside(2**21).splitlines() == [
        "rank 0, in 2,097,152 B    derived  on the wire",
        "reduce_scatter_single        1.50         1.50",
    ]
    assert Ledger(ledger.ranks[:1]).beside(2**21, 0).endswith("1.50")
    for entry in ledger.ranks[0].entries.values():
        entry.wire = None
    assert ledger.beside(2**21).endswith("1.50            -")


def test_who_does_not_ask_gets_no_column_and_no_connections():
    def fn(rank, world_size):
        comm.all_reduce(torch.ones(2**20))
        found = wire._connections()
        for opened in found.values():
            opened.close()
        return len(found)

    run = lab.launch(fn, 3)
    assert list(run) == [2, 2, 2]
    assert "wire" not in str(run.ledger)
    assert run.ledger.on_the_wire("all_reduce", 0) is None
    assert run.ledger.derived("all_reduce", 0) == 1.33


def test_two_kinds_of_sends_share_their_connections():
    own = RankLedger()
    own.add("isend", 5, 0, {1})
    own.add("send", 5, 0, {1})
    own.enter_wire({"isend": 10})
    assert [entry.wire for entry in own.entries.values()] == [None, None]


def test_where_it_cannot_be_read_the_column_is_absent_and_says_why(monkeypatch):
    assert wire.obstacle("gloo") == ""
    assert "nccl does not send through sockets of this process" in wire.obstacle("nccl")
    monkeypatch.setattr(operating_system, "NAME", "darwin")
    assert wire.obstacle("gloo") == "the wire cannot be read on darwin, only on Linux"
    own = RankLedger()
    own.add("all_reduce", 2**20, 2**20, {1})
    text = str(Ledger([own], shows_wire=True, obstacle=wire.obstacle("gloo")))
    assert text.splitlines()[0].endswith("peers")
    assert text.endswith("on the wire: not counted, the wire cannot be read on darwin, only on Linux")


def test_a_rank_that_fails_meanwhile_is_reported_as_ever():
    def fn(rank, world_size):
        comm.all_reduce(torch.ones(4))
        if rank == 1:
            raise ValueError("on purpose")

    with pytest.raises(lab.RankError, match="rank 1 of 3 raised ValueError: on purpose"):
        lab.launch(fn, 3, wire=True)
