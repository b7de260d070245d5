"""The ledger: counted messages, the closed forms of collectives, and how it prints."""

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.record import traffic

WORLD = 4


def test_a_ring_counts_the_chunks_it_passes_on_and_blocks_to_oneself_do_not_travel():
    def fn(rank, world_size):
        comm.all_reduce(torch.ones(10))  # 4 bytes each; chunks of 3, 3, 3, 1
        comm.all_to_all_single(torch.empty(8), torch.ones(8), [2] * 4, [2] * 4)

    ledger = lab.launch(fn, WORLD).ledger
    assert ledger.sent("all_to_all_single", 0) == 6 * 4
    assert [ledger.sent("all_reduce", rank) // 4 for rank in range(WORLD)] == [14, 16, 16, 14]


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("elements", [0, 1, 5, 12])
def test_rings_conserve_bytes_and_neighbours_agree(size, elements):
    chunks = traffic.split(elements, size)
    assert sum(chunks) == elements
    for ring in (traffic.all_reduce, traffic.reduce_scatter, traffic.all_gather):
        moved = [ring(chunks, position) for position in range(size)]
        assert all(moved[position].received == moved[position - 1].sent for position in range(size))
        if elements % size == 0:
            passes = 2 if ring is traffic.all_reduce else 1
            assert {move.sent for move in moved} == {passes * (size - 1) * elements // size}
    for root in range(size):
        for spread in (traffic.broadcast, traffic.gather, traffic.scatter):
            moved = [spread(elements, size, position, root) for position in range(size)]
            assert sum(move.sent for move in moved) == sum(move.received for move in moved) == (size - 1) * elements
        moved = [traffic.reduce(chunks, position, root) for position in range(size)]
        assert {move.sent for position, move in enumerate(moved) if position != root} <= {elements}
        assert sum(move.sent for move in moved) == sum(move.received for move in moved)
        assert moved[root].sent == elements - chunks[root]
        reached, told = {root}, [root]
        for rank in told:  # a broadcast's tree reaches every rank once, and later ones from earlier ones
            told += traffic.children(size, rank, root)
            reached |= set(told)
        assert len(told) == len(reached) == size


def test_the_ledger_prints_the_same_in_every_form():
    def fn(rank, world_size):
        comm.all_reduce(torch.ones(300))
        with lab.span("compute", label="named"):
            before = lab.now()
            lab.compute(1)
        return lab.now() - before

    out = lab.launch(fn, 2, clock="virtual")
    assert out == [1_000_000] * 2
    assert [span.label for span in out.timeline.spans_by_rank[0] if span.kind == "compute"] == ["named"]
    assert str(out.ledger) == repr(out.ledger)
    assert out.ledger._repr_html_().count("1,200") == 4
    assert str(out.ledger).count("1,200") == 4
    assert "no rank communicated" in str(lab.launch(lambda rank, world_size: None, 1).ledger)
