"""Three clocks: model time that repeats to the bit, an emulated link that keeps its promise, and plain real time."""

import time
from types import SimpleNamespace

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch import emulator

MEGABYTE = torch.zeros(250_000)  # of float32


def one_f_one_b(rank, world_size, num_microbatches, forward_ms, backward_ms):
    """A 1F1B step by hand: receive, work, send on."""
    x = torch.zeros(1_250)  # 5,000 bytes
    warmup = min(world_size - rank - 1, num_microbatches)
    order = ["F"] * warmup + ["F", "B"] * (num_microbatches - warmup) + ["B"] * warmup
    for kind in order:
        source, target = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
        if 0 <= source < world_size:
            comm.recv(x, source)
        lab.compute(forward_ms if kind == "F" else backward_ms, kind)
        if 0 <= target < world_size:
            comm.isend(x, target)


def test_virtual_time_repeats_to_the_bit_and_equals_the_closed_form():
    def times(link):
        runs = [lab.launch(one_f_one_b, 3, 6, 5, 10, clock="virtual", link=link).timeline for _ in range(2)]
        assert runs[0].to_dict() == runs[1].to_dict()
        return runs[0]

    times(lab.Link(gbps=0.01, latency_ms=0.5))  # 5,000 bytes take 4 ms
    run = times(None)
    assert run.makespan == (6 + 3 - 1) * 15_000_000
    assert run.source == "virtual"


def test_messages_on_one_link_queue_up():
    def fn(rank, world_size):
        if rank == 0:
            works = [comm.isend(MEGABYTE, 1) for _ in range(3)]
            for work in works:
                work.wait()
        else:
            for _ in range(3):
                comm.recv(torch.empty_like(MEGABYTE), 0)

    link = lab.Link(gbps=1, latency_ms=2)
    timeline = lab.launch(fn, 2, clock="virtual", link=link).timeline
    assert [message.arrived for message in timeline.messages] == [10_000_000, 18_000_000, 26_000_000]
    assert [message.left for message in timeline.messages] == [None, 8_000_000, 16_000_000]
    assert {message.num_bytes for message in timeline.messages} == {1_000_000}


COLLECTIVES = [  # steps, and volume in tensors
    (lambda x: comm.all_reduce(x), 6, 1.5),
    (lambda x: comm.all_gather_single(torch.empty(1_000_000), x), 3, 3),
    (lambda x: comm.reduce_scatter_single(torch.empty(62_500), x), 3, 0.75),
    (lambda x: comm.all_to_all_single(torch.empty_like(x), x), 1, 0.75),
    (lambda x: comm.broadcast(x, 1), 2, 2),  # two rounds of a tree, each with the full tensor
    (lambda x: comm.reduce(x, 1), 4, 1.5),  # the root receives three chunks, and three finished ones
]


def test_a_collective_starts_with_its_last_rank_and_takes_its_model_time():
    def fn(rank, world_size):
        found = []
        for call, _, _ in COLLECTIVES:
            start = lab.now()
            lab.compute(10 * rank)
            call(MEGABYTE.clone())
            found.append(lab.now() - start)
        return found

    expected = [30_000_000 + steps * 1_000_000 + round(volume * 8_000_000) for _, steps, volume in COLLECTIVES]
    out = lab.launch(fn, 4, clock="virtual", link=lab.Link(gbps=1, latency_ms=1))
    assert list(map(max, zip(*out, strict=True))) == expected


def test_a_collective_waits_for_its_last_rank_even_where_a_root_need_not():
    """Without that, model time would depend on which process happens to run first."""

    def fn(rank, world_size):
        found = []
        for late in range(world_size):
            if rank == late:
                time.sleep(0.15)  # really late, and 40 ms late in model time
                lab.compute(40)
            x = torch.zeros(8)
            comm.broadcast(x, 1)
            comm.reduce(x, 1)
            comm.scatter(x, [torch.zeros(8)] * world_size if rank == 1 else None, 1)
            comm.gather(x, [torch.zeros(8) for _ in range(world_size)] if rank == 1 else None, 1)
            found.append(lab.now())
        return found

    assert lab.launch(fn, 3, clock="virtual") == [[40_000_000, 80_000_000, 120_000_000]] * 3


def test_a_root_that_waits_for_a_rank_that_never_comes_is_explained():
    def fn(rank, world_size):
        if rank == 0:
            comm.broadcast(torch.zeros(8), 0)
        else:
            comm.recv(torch.zeros(1), 0)

    with pytest.raises(lab.RankTimeout, match="broadcast: rank 1 never joined"):
        lab.launch(fn, 2, clock="virtual")


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)])
def test_a_collective_has_its_place_on_the_link_from_its_call_in_whatever_order_it_is_waited_for(order):
    def fn(rank, world_size):
        works = []
        for _ in range(3):
            lab.compute(10)
            works.append(comm.all_reduce(MEGABYTE.clone(), async_op=True))  # 8 Mbit on 2 ranks
        for place in order[rank:] + order[:rank]:  # the ranks need not even agree
            works[place].wait()
        return lab.now()

    run = lab.launch(fn, 2, clock="virtual", link=lab.Link(gbps=3.2))
    assert run == [32_500_000] * 2
    expected = [(10_000_000, 12_500_000), (20_000_000, 22_500_000), (30_000_000, 32_500_000)]
    assert [[(span.start, span.end) for span in spans] for spans in run.collectives] == [expected] * 2


def test_two_groups_of_the_same_ranks_have_a_link_each():
    """And each its own order: rank 1 calls them the other way round, which neither GLOO nor NCCL minds."""

    def fn(rank, world_size):
        groups = [comm.new_group([0, 1]) for _ in range(2)] + [None]
        works = {}
        for place in (0, 1, 2) if rank == 0 else (2, 1, 0):
            works[place] = comm.all_reduce(MEGABYTE.clone(), group=groups[place], async_op=True)
            lab.compute(1)
        for place in range(3):
            works[place].wait()
        return lab.now()

    run = lab.launch(fn, 2, clock="virtual", link=lab.Link(gbps=0.8))  # 10 ms each
    assert run == [12_000_000] * 2
    assert [[(span.start, span.end) for span in spans] for spans in run.collectives] == [
        [(1_000_000, 11_000_000), (2_000_000, 12_000_000), (2_000_000, 12_000_000)]
    ] * 2


def test_messages_of_two_groups_of_the_same_ranks_are_told_apart():
    def fn(rank, world_size):
        groups = [comm.new_group([0, 1]) for _ in range(2)]
        small, large = MEGABYTE[:1_000], MEGABYTE
        if rank == 0:
            works = [comm.isend(large, 1, group=groups[0]), comm.isend(small, 1, group=groups[1])]
            for work in works:
                work.wait()
        else:
            comm.recv(torch.empty_like(small), 0, group=groups[1])
            comm.recv(torch.empty_like(large), 0, group=groups[0])

    messages = lab.launch(fn, 2, clock="virtual", link=lab.Link(gbps=1)).timeline.messages
    assert [(message.num_bytes, message.arrived) for message in messages] == [
        (1_000_000, 8_000_000),
        (4_000, 8_032_000),
    ]


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_messages_are_matched_in_the_order_of_the_calls_in_whatever_order_they_are_waited_for(clock):
    sizes = [1000, 1, 10]

    def fn(rank, world_size):
        sent = [torch.full((size,), float(size)) for size in sizes]
        if rank == 0:
            for work in [comm.isend(tensor, 1) for tensor in sent]:
                work.wait()
            return None
        buffers = [torch.empty(size) for size in sizes]
        works = [comm.irecv(buffer, 0) for buffer in buffers]
        for number in (2, 0, 1):
            works[number].wait()
        return all(torch.equal(*pair) for pair in zip(sent, buffers, strict=True)), lab.now()

    emulated = {"clock": clock, "link": lab.Link(gbps=0.001, latency_ms=1)} if clock == "virtual" else {}
    out = lab.launch(fn, 2, **emulated)
    messages = out.timeline.messages
    assert out[1][0]
    assert [message.num_bytes for message in messages] == [4000, 4, 40]
    if clock == "virtual":  # a byte takes 8000 ns, and each message leaves when the one before has left
        assert [message.arrived for message in messages] == [33_000_000, 33_032_000, 33_352_000]


def test_the_wall_clock_link_keeps_its_model_within_three_percent():
    """Never faster; and not slower in the best of 20 messages, for a busy machine delays some of them."""

    def fn(rank, world_size):
        moments = []
        for _ in range(20):
            comm.barrier()
            if rank == 0:
                moments.append(time.perf_counter())  # all processes of a machine share this clock
                comm.send(MEGABYTE, 1)
            else:
                comm.recv(torch.empty_like(MEGABYTE), 0)
                moments.append(time.perf_counter())
        return moments

    sent, received = lab.launch(fn, 2, link=lab.Link(gbps=0.1, latency_ms=5))
    quickest = min(end - start for start, end in zip(sent, received, strict=True))
    model = 0.085  # 8 Mbit at 0.1 Gbit/s and 5 ms
    assert model <= quickest <= model * 1.03


def test_a_slow_link_hides_behind_work():
    def fn(rank, world_size):
        seconds = []
        for _ in range(10):  # a busy machine delays some of them
            comm.barrier()
            start = time.perf_counter()
            work = comm.irecv(torch.empty_like(MEGABYTE), 0) if rank else comm.isend(MEGABYTE, 1)
            lab.compute(60)
            work.wait()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    # 60 + 42 ms if they followed one another
    assert 0.06 <= lab.launch(fn, 2, link=lab.Link(gbps=0.2, latency_ms=2))[1] < 0.085


def test_an_emulated_transfer_is_no_deadlock():
    def fn(rank, world_size):
        if rank:
            comm.recv(torch.empty_like(MEGABYTE), 0)
        else:
            comm.send(MEGABYTE, 1)
        return "arrived"

    assert lab.launch(fn, 2, link=lab.Link(gbps=0.002, latency_ms=0)) == ["arrived"] * 2  # 4 s in flight


def test_work_sleeps_under_the_wall_clock_so_that_eight_ranks_share_two_cores():
    """Processor time and not time on the wall: a busy machine wakes a sleeper late."""

    def fn(rank, world_size):
        import time

        before = time.process_time()
        lab.compute(200, "work")
        return time.process_time() - before

    found = lab.launch(fn, 8)
    assert max(found) < 0.05
    assert found.timeline.makespan >= 0.2e9
    assert found.timeline.source == "measured"


def test_links_and_nodes_are_checked():
    for bad in ({"gbps": 0}, {"gbps": -1}, {"gbps": 1, "latency_ms": -1}):
        with pytest.raises(ValueError, match="a link needs gbps > 0 and latency_ms >= 0"):
            lab.Link(**bad)
    for bad in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="a node holds a whole number of ranks from 1"):
            lab.NodeLink(lab.Link(gbps=8), lab.Link(gbps=1), bad)


def test_a_collective_is_seen_from_its_start_to_its_end_while_the_rank_works():
    """Two sums of 20 ms are asked for at once; both travel, one after the other, while rank 1 comes 10 ms late."""

    def fn(rank, world_size):
        lab.compute(10 * rank)
        works = [comm.all_reduce(MEGABYTE[:2500].clone(), async_op=True) for _ in range(2)]
        lab.compute(100)
        for work in works:
            work.wait()

    link = lab.Link(gbps=0.004)  # 10,000 bytes of an all-reduce of two ranks
    for first, second in lab.launch(fn, 2, link=link).collectives:
        assert (first.label, second.label) == ("all_reduce", "all_reduce")
        assert first.duration == second.duration == 20_000_000
        assert first.start >= 10_000_000  # a busy machine may be late with either call, and never early
        assert second.start >= first.end


def test_two_speeds_are_told_apart_by_the_nodes():
    """A ring inside a node is fast, one that leaves it is slow; so are messages, with their latency."""

    def fn(rank, world_size):
        pairs = [comm.new_group(ranks) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]]
        found = []
        for group in (pairs[rank // 2], pairs[2 + rank % 2], None):
            start = lab.now()
            comm.all_reduce(MEGABYTE.clone(), group=group)
            found.append((lab.now() - start) / 1e6)
        for peer in (rank ^ 1, rank ^ 2):
            start = lab.now()
            sending = comm.isend(MEGABYTE, peer)
            comm.recv(torch.empty_like(MEGABYTE), peer)
            sending.wait()
            found.append((lab.now() - start) / 1e6)
        return found

    link = lab.NodeLink(lab.Link(gbps=8, latency_ms=1), lab.Link(gbps=1, latency_ms=5), ranks_per_node=2)
    for found in lab.launch(fn, 4, clock="virtual", link=link):
        assert found == [2 * 1 + 1, 2 * 5 + 8, 6 * 5 + 1.5 * 8, 1 + 1, 5 + 8]


def test_a_rank_that_polls_for_a_late_member_pauses_longer_and_longer_up_to_a_bound(monkeypatch):
    """With fake time: a pause that doubled for ever would make the rank sleep for seconds."""
    pauses, stamps = [], iter([None] * 40 + [7])
    monkeypatch.setattr(emulator.time, "sleep", pauses.append)
    late = SimpleNamespace(take=lambda *place: next(stamps))
    operation = SimpleNamespace(stream=0, sequence=0)
    assert emulator.Emulator(0, None, None, late)._joined_ns(1, operation) == 7
    assert len(pauses) == 40
    assert pauses == sorted(pauses)
    assert (pauses[0], max(pauses)) == (emulator.SHORTEST_PAUSE, emulator.LONGEST_PAUSE)
