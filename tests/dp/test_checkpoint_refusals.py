"""What cannot be saved or loaded is named, with file and tensor, and changes nothing; damage is in `drills`."""

import re

import pytest
import torch
from checkpoint_runs import Counting, make, same, save_from, state_of
from models import launch
from torch import nn
from zero_runs import HYPER, Blocks

from dualpipe_lab.dp.checkpoint import CheckpointError, latest, load, save, saved_steps
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.zero1 import Zero1


class Wider(Counting):
    def __init__(self, dtype=torch.float64, **options):
        super().__init__(dtype, **options)
        self.blocks[0][0] = nn.Linear(5, 5, bias=False, dtype=dtype)
        self.blocks[0][0].weight = nn.Parameter(torch.zeros(6, 5, dtype=dtype))


class Renamed(Counting):
    def __init__(self, dtype=torch.float64, **options):
        super().__init__(dtype, **options)
        self.other = self.temperature
        del self.temperature


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        (Renamed, torch.float64, r"has no tensor parameter/other; it is a checkpoint of another model or optimizer"),
        (Wider, torch.float64, r"tensor parameter/blocks.0.0.weight has shape \(5, 5\), the model's has \(6, 5\)"),
        (Blocks, torch.float64, r"has tensor \S+, the model has not; it is a checkpoint of another model"),
        (Counting, torch.float32, r"rank-0000\d.safetensors: tensor \S+ is float64, the model's is float32"),
        (Counting, torch.float64, r"was saved without a loss scaler; leave out scaler="),
    ],
)
def test_what_cannot_be_loaded_is_named_and_changes_nothing(kind, dtype, message, tmp_path):
    _, path, _ = save_from(Zero1, 2, tmp_path)

    def fn(rank, world_size):
        optimizer = Zero1(kind(dtype, seed=2), **HYPER)
        before = state_of(optimizer)
        with pytest.raises(CheckpointError) as caught:
            load(path, optimizer, scaler=LossScaler() if "scaler" in message else None)
        return str(caught.value), same(state_of(optimizer), before)

    ((problem, unchanged),) = set(launch(fn, 3))  # all ranks say the same
    assert unchanged
    assert re.search(message, problem), problem


BAD = [
    r"^keep counts from 1, got 0; leave it out to keep all checkpoints",
    r"^sampler and config must be such as JSON can hold",
    r"^tensor buffer/turns is complex64, which safetensors cannot hold; convert it",
    r"^tensor buffer/mean has other values on rank 1 than on rank 0; .* average it over the ranks before the save",
]


def test_what_cannot_be_saved_is_refused(tmp_path):
    def fn(rank, world_size):
        optimizer, complexes, statistics = make(DDP), Blocks(), Blocks()
        complexes.register_buffer("turns", torch.zeros(2, dtype=torch.complex64))
        statistics.register_buffer("mean", torch.zeros(3))
        others = [DDP(complexes), DDP(statistics)]
        statistics.mean += rank  # of other data
        calls = [(optimizer, {"keep": 0}), (optimizer, {"sampler": object()}), *((other, {}) for other in others)]
        for (saved, options), message in zip(calls, BAD, strict=True):
            with pytest.raises(ValueError, match=message):
                save(tmp_path, 1, saved, **options)

    launch(fn, 2)
    assert saved_steps(tmp_path) == []
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        latest(tmp_path / "nowhere")
