"""ZeRO inside of nodes and all-reduce across them; the moving average of sharded weights."""

import pytest
import torch
from models import assert_close, launch
from test_zero_accounts import make, step
from zero_runs import BATCHES, HYPER, STAGES, Blocks, build, reference, train

import dualpipe_lab as lab
from dualpipe_lab.dp.checkpoint import load, save
from dualpipe_lab.dp.closed_forms import sent_bytes
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.ema import ShardedEMA
from dualpipe_lab.dp.hybrid import count_by_node, hybrid_sent_bytes
from dualpipe_lab.dp.measure import storage_bytes
from dualpipe_lab.dp.sharded import full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.sharding import shard_slice

TOPOLOGY = lab.Topology([("dp", 4)], ranks_per_node=2)
SHARDED = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


def hybrid(stage, model, mesh, **options):
    options = {**options, "hybrid": True, "reduce": "sum"}
    if stage is Zero3:
        return Zero3(model, mesh, units=getattr(model, "units", list(model.children())), **options)
    return stage(model, mesh, **options)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_bytes_within_nodes_and_between_them_equal_the_closed_forms(num_microbatches):
    def fn(rank, world_size):
        mesh, found = lab.Mesh(TOPOLOGY), {}
        ledger = count_by_node(TOPOLOGY)
        for name, stage in SHARDED.items():
            for is_hybrid in (False, True):
                model, more = make(8, torch.bfloat16), {"num_backwards": num_microbatches, "master": True}
                optimizer = hybrid(stage, model, mesh, **more) if is_hybrid else stage(model, **more)
                before = ledger.total()
                step(optimizer, num_microbatches, torch.bfloat16)
                sent = [after - start for after, start in zip(ledger.total(), before, strict=True)]
                state = storage_bytes(
                    tensor for held in optimizer.local_shards for tensor in held.optimizer.state_dict().values()
                )
                found[name, is_hybrid] = tuple(sent), optimizer.padded_numel, state
        return found

    out = launch(fn, 4)
    for rank, found in enumerate(out):
        for name in SHARDED:
            sent, padded, state = found[name, True]
            assert sent == hybrid_sent_bytes(name, 2, 2, padded, num_microbatches)
            assert state == 12 * padded // 2  # shards of a node's 2 ranks; flat ZeRO has half of it
            flat, padded, state = found[name, False]
            expected = sent_bytes(name, 4, padded, num_microbatches)
            assert flat == ((0, expected) if rank % 2 else (expected, 0))  # the ring leaves the node at its last rank
            assert state == 12 * padded // 4
    assert found["zero3", True][0][1] < found["zero3", False][0][1]
    assert out.ledger.sent() > 0  # the launch's own ledger goes on


@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_average_is_that_of_one_process_at_every_stage(dtype, nodes, tmp_path):
    """It is saved with the weights, whose replicas on other nodes never drift apart; 3 ranks, or 2 nodes of 2."""
    hyper = {**HYPER, "master": dtype == torch.bfloat16}

    def fn(rank, world_size):
        def make(stage, seed):
            model = Blocks(dtype, seed=seed)
            return hybrid(stage, model, lab.Mesh(TOPOLOGY), **hyper) if nodes else build(stage, model, hyper)

        found = []
        for stage in STAGES:
            optimizer = make(stage, rank)
            ema = ShardedEMA(optimizer, 0.8)
            for batch in BATCHES:
                train(optimizer, shard_slice(6, world_size, rank), [batch], 1)
                ema.update()
            weights = full_weights(optimizer)
            with ema.applied():
                averaged = full_weights(optimizer)
            back = full_weights(optimizer)
            path = save(tmp_path / stage.__name__, 3, optimizer)
            extra = storage_bytes(held.optimizer.extra["ema"] for held in optimizer.local_shards)
            again = make(stage, 7)
            other = ShardedEMA(again, 0.8)
            load(path, again)
            assert all(torch.equal(weights[name], value) for name, value in back.items())
            assert all(torch.equal(weights[name], value) for name, value in full_weights(again).items())
            with other.applied():
                assert all(torch.equal(averaged[name], value) for name, value in full_weights(again).items())
            found.append((weights, averaged, extra, optimizer.padded_numel))
        return found

    models = [Blocks(), *(reference(BATCHES[: number + 1])[0] for number in range(3))]
    expected = {name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}
    for weights in models[1:]:
        for name in expected:
            expected[name] = 0.8 * expected[name] + 0.2 * weights[name]
    first, *others = launch(fn, 4 if nodes else 3)
    for at, (weights, averaged, extra, padded) in enumerate(first):
        if dtype == torch.float64:
            assert_close(averaged, expected)
            assert_close(weights, models[-1])
        assert all(torch.equal(weights[name], found[at][0][name]) for found in others for name in weights)
        shards = 1 if STAGES[at] is DDP else 2 if nodes else 3
        assert extra == (8 if dtype == torch.float64 else 4) * padded // shards


def test_bytes_that_are_addressed_count_by_where_they_go():
    def fn(rank, world_size):
        ledger, x = count_by_node(TOPOLOGY), torch.zeros(10, dtype=torch.uint8)
        counts = torch.tensor([[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 4]])
        sends, receives = counts[rank].tolist(), counts[:, rank].tolist()
        lab.comm.all_to_all_single(x.new_zeros(sum(receives)), x[: sum(sends)], receives, sends)
        lab.comm.gather(x, [x.clone() for _ in range(4)] if rank == 1 else None, dst=1)
        lab.comm.scatter(x, [x.clone() for _ in range(4)] if rank == 1 else None, src=1)
        lab.comm.reduce(x, dst=1)
        lab.comm.broadcast(x, src=1)
        lab.comm.isend(x, rank ^ 2).wait() if rank < 2 else lab.comm.recv(x, rank ^ 2)
        return {name: tuple(sent) for name, sent in ledger.sent_by_operation.items()}

    found = launch(fn, 4)
    assert [sent["all_to_all_single"] for sent in found] == [(1, 5), (3, 3), (1, 5), (3, 3)]
    assert [sent["gather"] for sent in found] == [(10, 0), (0, 0), (0, 10), (0, 10)]
    assert [sent["scatter"] for sent in found] == [(0, 0), (10, 20), (0, 0), (0, 0)]
    assert [sent["reduce"] for sent in found] == [
        (10, 0),
        (0, 7),
        (7, 3),
        (0, 10),
    ]  # chunks 3 3 3 1
    assert [sent["broadcast"] for sent in found] == [(0, 0), (0, 20), (0, 10), (0, 0)]  # 1 -> 2, then 1 -> 3 and 2 -> 0
    assert [sent["isend"] for sent in found[:2]] == [(0, 10)] * 2
