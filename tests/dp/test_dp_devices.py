"""On a device of their own, ranks send what lies there: a number of the CPU would make the host wait in every step."""

import pytest
import torch
from models import launch, make_batch
from runs import devices_sent
from zero_runs import STAGES, Blocks, build

import dualpipe_lab as lab
from dualpipe_lab.dp import checkpoint
from dualpipe_lab.dp.data_parallel import all_reduce_gradients, num_valid_tokens, token_loss
from dualpipe_lab.dp.ema import ShardedEMA
from dualpipe_lab.dp.grad_norm import global_norm
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import full_gradients, full_weights
from dualpipe_lab.dp.zero1 import Zero1

pytestmark = [pytest.mark.on_gloo("each launch names its back end"), pytest.mark.usefixtures("on_stand_in")]


def test_every_collective_of_a_step_sends_tensors_of_the_device():
    """Counts, flags and norms too, also of a rank that has no data and no gradient to say where they belong."""

    def fn(rank, world_size, batch):
        sent, (tokens, targets) = devices_sent(), batch
        num_tokens = num_valid_tokens(targets) + num_valid_tokens([])
        assert not LossScaler().found_inf([])
        assert global_norm([], {"dp": None}) == 0
        for stage in STAGES:
            optimizer = build(stage, Blocks().to(lab.device()), {})
            token_loss(optimizer.module(tokens), targets, num_tokens).mul(2.0**16).backward()
            full_gradients(optimizer)
            assert optimizer.step(max_norm=0.1, scaler=LossScaler()).stepped
            with ShardedEMA(optimizer).applied():
                full_weights(optimizer)
        model = Blocks().to(lab.device())
        all_reduce_gradients(model.parameters())
        return dict(sent)

    for sent in launch(fn, 2, make_batch(), backend="nccl"):
        assert {"all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single"} <= sent.keys()
        assert set().union(*sent.values()) == {"cuda"}, sent


def test_a_checkpoint_goes_from_the_cpu_to_a_device_and_back(tmp_path):
    def save(rank, world_size, seed, source):
        optimizer = Zero1(Blocks(torch.bfloat16, seed=seed).to(lab.device()), rounding_seed=seed)
        if source is not None:
            checkpoint.load(source, optimizer)
        places = {
            tensor.device.type for held in optimizer.local_shards for tensor in held.optimizer.state_dict().values()
        }
        folder = tmp_path / f"{lab.device().type}-{seed}"
        return checkpoint.save(folder, 1, optimizer), places, torch.rand(3, device=lab.device()).cpu()

    first, places, _ = launch(save, 2, 0, None)[0]
    second, places_there, _ = launch(save, 2, 1, first, backend="nccl")[0]
    third, places_back, _ = launch(save, 3, 2, second)[0]
    assert (places, places_there, places_back) == ({"cpu"}, {"cuda"}, {"cpu"})
    one, *others = (checkpoint.Checkpoint(path) for path in (first, second, third))
    for other in others:
        assert all(torch.equal(one.read(name), other.read(name)) for name in one.names())
    states = [found.index.values["random"][0].keys() for found in (one, *others)]
    assert ["cuda" in state for state in states] == [False, True, False]
