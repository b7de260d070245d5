"""Every operation but reduce-scatter against what it should compute, and its ledger, on real ranks."""

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm

WORLD = 4


SIZE = 8  # elements per rank, divisible by the world


def inputs(dtype=torch.float32, size=SIZE):
    """Small integers, so that every order of summation gives the same bits."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(-8, 9, (size,), generator=generator).to(dtype) for _ in range(WORLD)]


def all_reduce(x, rank):
    comm.all_reduce(x[rank])
    return x[rank]


def all_reduce_max(x, rank):
    comm.all_reduce(x[rank], op="max")
    return x[rank]


def broadcast(x, rank):
    comm.broadcast(x[rank], 2)
    return x[rank]


def reduce(x, rank):
    comm.reduce(x[rank], 1)
    return x[rank] if rank == 1 else None


def all_gather_single(x, rank):
    output = torch.empty(WORLD * SIZE, dtype=x[0].dtype)
    comm.all_gather_single(output, x[rank])
    return output


def all_to_all_single(x, rank):
    output = torch.empty_like(x[rank])
    comm.all_to_all_single(output, x[rank])
    return output


def all_gather(x, rank):
    outputs = [torch.empty_like(x[0]) for _ in range(WORLD)]
    comm.all_gather(outputs, x[rank])
    return torch.cat(outputs)


def uneven_all_to_all(x, rank):
    sizes = [[1, 2, 5, 0], [0, 0, 8, 0], [2, 2, 2, 2], [8, 0, 0, 0]]
    received = [sizes[source][rank] for source in range(WORLD)]
    output = torch.empty(sum(received), dtype=x[0].dtype)
    comm.all_to_all_single(output, x[rank], received, sizes[rank])
    return output


def gather(x, rank):
    outputs = [torch.empty_like(x[0]) for _ in range(WORLD)] if rank == 3 else None
    comm.gather(x[rank], outputs, 3)
    return torch.cat(outputs) if outputs else None


def scatter(x, rank):
    output = torch.empty_like(x[0])
    comm.scatter(output, list(x) if rank == 0 else None, 0)
    return output


def peers(x, rank):
    output = torch.empty_like(x[0])
    work = comm.irecv(output, (rank - 1) % WORLD, tag=5)
    comm.isend(x[rank], (rank + 1) % WORLD, tag=5).wait()
    work.wait()
    work.wait()  # the second time is free
    return output


def batched_peers(x, rank):
    output = torch.empty_like(x[0])
    batch = [comm.P2P("isend", x[rank], (rank + 1) % WORLD), comm.P2P("irecv", output, (rank - 1) % WORLD)]
    for work in comm.batch_isend_irecv(batch):
        work.wait()
    assert comm.batch_isend_irecv([]) == []
    return output


def from_anybody(x, rank):
    comm.barrier()  # the next call's messages are of another size
    if rank:
        comm.send(x[rank], 0)
        return None
    found = {}
    for _ in range(WORLD - 1):
        output = torch.empty_like(x[0])
        found[comm.recv(output)] = output
    return torch.cat([found[source] for source in sorted(found)])


def subgroups(x, rank):
    groups = [comm.new_group([0, 2]), comm.new_group([3, 1])]
    mine = groups[rank % 2]
    comm.all_reduce(x[rank], group=mine)
    assert comm.get_world_size(mine) == 2
    assert comm.get_rank(mine) == ([0, 2] if rank % 2 == 0 else [1, 3]).index(rank)
    with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
        comm.all_reduce(x[rank], group=groups[1 - rank % 2])
    return x[rank]


def asynchronous(x, rank):
    works = [comm.all_reduce(x[rank][i : i + 2], async_op=True) for i in range(0, SIZE, 2)]
    for work in reversed(works):
        work.wait()
    return x[rank]


EXPECTED = {
    all_reduce: lambda x, rank: sum(x),
    all_reduce_max: lambda x, rank: torch.stack(x).amax(0),
    broadcast: lambda x, rank: x[2],
    reduce: lambda x, rank: sum(x) if rank == 1 else None,
    all_gather_single: lambda x, rank: torch.cat(x),
    all_to_all_single: lambda x, rank: torch.cat([block.chunk(WORLD)[rank] for block in x]),
    all_gather: lambda x, rank: torch.cat(x),
    uneven_all_to_all: lambda x, rank: torch.cat(
        [
            block.split(sizes)[rank]
            for block, sizes in zip(x, [[1, 2, 5, 0], [0, 0, 8, 0], [2, 2, 2, 2], [8, 0, 0, 0]], strict=True)
        ]
    ),
    gather: lambda x, rank: torch.cat(x) if rank == 3 else None,
    scatter: lambda x, rank: x[rank],
    peers: lambda x, rank: x[rank - 1],
    batched_peers: lambda x, rank: x[rank - 1],
    from_anybody: lambda x, rank: None if rank else torch.cat(x[1:]),
    subgroups: lambda x, rank: sum(x[rank % 2 :: 2]),
    asynchronous: lambda x, rank: sum(x),
}


CASES = [(call, dtype) for call in EXPECTED for dtype in (torch.float32, torch.bfloat16, torch.int64)]


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_every_operation_computes_what_its_name_says_and_all_bytes_arrive(clock):
    def fn(rank, world_size):
        return [call(inputs(dtype), rank) for call, dtype in CASES]

    results = lab.launch(fn, WORLD, clock=clock)
    for name in results.ledger.ranks[0].entries.keys() - {"all_reduce", "isend", "irecv", "send", "recv"}:
        assert results.ledger.sent(name) == results.ledger.received(name), name
    assert results.ledger.peers(0, "recv") == {1, 2, 3}  # though the sender was not known before
    num_bytes = 2 * SIZE * (4 + 2 + 8)  # `peers` and `batched_peers`, by type
    for rank in range(WORLD):
        assert results.ledger.sent("isend", rank) == results.ledger.received("irecv", rank) == num_bytes
        assert results.ledger.peers(rank, "isend") == {(rank + 1) % WORLD}
        assert results.ledger.peers(rank, "irecv") == {(rank - 1) % WORLD}
    for rank, values in enumerate(results):
        for value, (call, dtype) in zip(values, CASES, strict=True):
            expected = EXPECTED[call](inputs(dtype), rank)
            assert (value is None) == (expected is None), (call, dtype)
            assert value is None or torch.equal(value, expected), (call, dtype)


def test_objects_are_gathered_whatever_their_size():
    def fn(rank, world_size):
        return comm.all_gather_object({"rank": rank, "text": "x" * 100 * rank})

    assert lab.launch(fn, 3) == [[{"rank": rank, "text": "x" * 100 * rank} for rank in range(3)]] * 3


def test_different_sequences_of_collectives_are_an_error_even_if_they_happen_to_finish():
    def fn(rank, world_size):
        x = torch.ones(1)
        for call in (comm.all_reduce, comm.broadcast) if rank else (comm.broadcast, comm.all_reduce):
            work = call(x, **({"src": 0} if call is comm.broadcast else {}), async_op=True)
            del work

    with pytest.raises((lab.RankError, lab.RankTimeout), match="all_reduce"):
        lab.launch(fn, 2, timeout=3)


def test_plain_torch_and_comm_mix():
    import torch.distributed as dist

    def fn(rank, world_size):
        x = torch.ones(2)
        dist.all_reduce(x)
        comm.all_reduce(x)
        if rank == 0:
            dist.send(x, 1)
        else:
            comm.recv(x, 0)
        return x.tolist()

    for clock in ("wall", "virtual"):
        assert lab.launch(fn, 2, clock=clock) == [[4.0, 4.0]] * 2
