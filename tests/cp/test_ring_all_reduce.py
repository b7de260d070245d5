"""The ring all-reduce: equal to the sum on any number of ranks and elements, byte for byte as the closed form says."""

import json
from pathlib import Path

import pytest
import torch
from cp_runs import draw
from runs import RANKS, launch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.cp.ring import Ring, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.launch.record import traffic
from dualpipe_lab.viz import Steps

VECTORS = json.loads((Path(__file__).parents[1] / "oracles" / "collectives.json").read_text())["ring_allreduce"]
SIZES = (0, 1, 2, 3, 4, 7, 12, 1000)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def counted(call):
    """Messages and bytes that this rank sends during a call, and bytes that it receives."""
    ledger = rank_context().ledger.entries

    def reading():
        sends, receives = (ledger.get(name) for name in ("isend", "irecv"))
        return (sends.count, sends.sent, receives.received) if sends else (0, 0, 0)

    before = reading()
    call()
    return tuple(after - was for after, was in zip(reading(), before, strict=True))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_sums_are_those_of_the_collective_and_bytes_those_of_the_closed_form(num_ranks):
    def fn(rank, world_size):
        found = []
        for size in SIZES:
            for dtype in DTYPES:
                inputs = [(9 * draw(size, seed=number)).round().to(dtype) for number in range(world_size)]
                x, expected = inputs[rank], sum(inputs[1:], inputs[0].clone())  # small integers: exact in any order
                chunks = [part * x.element_size() for part in traffic.split(size, world_size)]
                moved = counted(lambda x=x: ring_all_reduce(x))
                form = traffic.all_reduce(chunks, rank)
                found.append(
                    (torch.equal(x, expected), moved[1:] == (form.sent, form.received), (size, dtype, moved, form))
                )
        return found

    for found in launch(fn, num_ranks):
        for right, as_predicted, case in found:
            assert right, case
            assert as_predicted, case


@pytest.mark.parametrize("name", VECTORS)
def test_every_step_is_that_of_the_recorded_schedule(name):
    vector = VECTORS[name]
    inputs, size = vector["inputs"], len(vector["inputs"])
    sizes = traffic.split(len(inputs[0]), size)

    def fn(rank, world_size):
        x, chunks = torch.tensor(inputs[rank]), torch.tensor(inputs[rank]).split(sizes)
        moved = counted(lambda: ring_all_reduce(x))
        comm.barrier()
        between = lab.now()
        local = (rank + 1) % world_size
        ring_reduce_scatter(chunks, Ring(), local)
        return x.tolist(), moved, {"rank": rank, "owns": local, "values": chunks[local].tolist()}, between

    out = launch(fn, size)
    results, moves, after_reduce_scatter, between = zip(*out, strict=True)
    assert list(results) == [vector["result"]] * size
    assert [sent for _, sent, _ in moves] == [8 * elements for elements in vector["sent_elements"]]
    picture = Steps.of_run(out.timeline.between(0, min(between)))
    sent = [{src: colour for src, _, (_, colour) in step.messages} for step in picture.log]
    # an empty chunk is not sent
    scheduled = [{r: c for r, c in enumerate(step["send_chunk"]) if sizes[c]} for step in vector["schedule"]]
    assert sent == [step for step in scheduled if step]
    if size > 1:
        assert list(after_reduce_scatter) == vector["after_reduce_scatter"]


def test_the_order_of_a_sum_is_the_ring_s_and_the_same_on_every_rank():
    """Chunk c begins on rank c and is added up along the ring."""
    inputs = [draw(7, seed=rank, dtype=torch.float32) for rank in range(4)]
    expected = []
    for chunk, values in enumerate(zip(*(x.split(traffic.split(7, 4)) for x in inputs), strict=True)):
        total = values[chunk]
        for hop in range(1, 4):
            total = values[(chunk + hop) % 4] + total
        expected.append(total)

    def fn(rank, world_size):
        x = inputs[rank].clone()
        ring_all_reduce(x)
        return x

    assert all(torch.equal(x, torch.cat(expected)) for x in launch(fn, 4))


def test_groups_other_owners_and_tensors_that_are_parameters():
    def fn(rank, world_size):
        groups = [comm.new_group([3, 1]), comm.new_group([0, 2])]
        group = groups[rank % 2 == 0]
        parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)))
        ring_all_reduce(parameter, group)
        ring = Ring(group)
        chunks = [torch.full((2, size), 10.0**ring.position) for size in (1, 3)]
        ring_reduce_scatter(chunks, ring, ring.position)
        own = chunks[ring.position].clone()
        ring_all_gather(chunks, ring, ring.position)
        return parameter.detach()[0, 0].item(), own.unique().tolist(), torch.cat(chunks, 1).unique().tolist()

    assert launch(fn, 4) == [(2.0, [11.0], [11.0]), (4.0, [11.0], [11.0])] * 2


def test_a_strided_tensor_is_refused_by_name():
    def fn(rank, world_size):
        ring_all_reduce(torch.zeros(4, 4).t()[:, :2] if rank == 1 else torch.zeros(8))

    with pytest.raises(lab.RankError, match=r"(?s)rank 1.*ring_all_reduce needs a contiguous tensor"):
        launch(fn, 2)
