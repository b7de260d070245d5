"""What cannot be saved or loaded is named, with file and tensor, and changes nothing."""

import json
import re

import pytest
import torch
from checkpoint_runs import Counting, make, same, save_from, state_of
from models import launch
from torch import nn
from zero_runs import HYPER, Blocks

import dualpipe_lab as lab
from dualpipe_lab.dp.checkpoint import CheckpointError, latest, load, save, saved_steps
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.zero1 import Zero1


def truncate(path):
    shard = path / "rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])


def garble(path):
    shard = path / "rank-00001.safetensors"
    shard.write_bytes(b"\xff" * shard.stat().st_size)


def rename_tensor(path):
    index = json.loads((path / "index.json").read_text())
    index["tensors"]["parameter/other"] = index["tensors"].pop("parameter/temperature")
    (path / "index.json").write_text(json.dumps(index))


def lose_a_piece(path):
    index = json.loads((path / "index.json").read_text())
    index["tensors"]["exp_avg/embedding.weight"]["pieces"].pop()
    (path / "index.json").write_text(json.dumps(index))


def swap_shards(path):
    """As a copy that mixes up names would: both files are of equal length."""
    first, second = (path / f"rank-0000{rank}.safetensors" for rank in range(2))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes().ljust(len(held)))
    second.write_bytes(held)
    index = json.loads((path / "index.json").read_text())
    index["files"] = {file.name: file.stat().st_size for file in (first, second)}
    (path / "index.json").write_text(json.dumps(index))


def take_another_step(path):
    """As a copy that broke off between two checkpoints would: names and lengths are equal."""
    shard = path / "rank-00001.safetensors"
    text = shard.read_bytes()
    assert b'"step": "2"' in text
    shard.write_bytes(text.replace(b'"step": "2"', b'"step": "3"'))


def call_it_int64(path):
    """The header and the index disagree about a type of equal width."""
    shard = path / "rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'"F64"', b'"I64"'))


def forget_values(path):
    index = json.loads((path / "index.json").read_text())
    del index["values"]["num_steps"]
    (path / "index.json").write_text(json.dumps(index))


class Wider(Counting):
    def __init__(self, dtype=torch.float64, **options):
        super().__init__(dtype, **options)
        self.blocks[0][0] = nn.Linear(5, 5, bias=False, dtype=dtype)
        self.blocks[0][0].weight = nn.Parameter(torch.zeros(6, 5, dtype=dtype))


@pytest.mark.parametrize(
    ("damage", "model", "message"),
    [
        (truncate, Counting, r"rank-00001.safetensors has \d+ bytes of \d+, so tensor \S+ cannot be read"),
        (garble, Counting, r"rank-00001.safetensors: tensor \S+ cannot be read"),
        (lambda path: (path / "rank-00001.safetensors").unlink(), Counting, r"rank-00001.safetensors is missing, so"),
        (lambda path: (path / "index.json").unlink(), Counting, r"index.json is missing, so .* is no checkpoint"),
        (lambda path: (path / "index.json").write_text("{"), Counting, r"index.json is damaged \(JSONDecodeError"),
        (lambda path: (path / "index.json").write_text('{"format": 0}'), Counting, r"damaged \(ValueError: format 0"),
        (rename_tensor, Counting, r"has no tensor parameter/temperature; it is a checkpoint of another model"),
        (
            swap_shards,
            Counting,
            r"rank-0000\d.safetensors: tensor \S+ cannot be read \(it says that it is .*do not mix",
        ),
        (
            take_another_step,
            Counting,
            r"rank-00001.safetensors: tensor \S+ cannot be read \(.*'step': '3'.*'step': '2'",
        ),
        (
            call_it_int64,
            Counting,
            r"rank-00001.safetensors: tensor \S+ cannot be read \(it has \d+ bytes of int64, the",
        ),
        (forget_values, Counting, r"index.json is damaged \(KeyError: 'num_steps'\)"),
        (lambda path: (path / "index.json").write_text("[]"), Counting, r"index.json is damaged \(TypeError"),
        (lose_a_piece, Counting, r"elements of tensor exp_avg/embedding.weight are in none of its files"),
        (None, Wider, r"tensor parameter/blocks.0.0.weight has shape \(5, 5\), the model's has \(6, 5\)"),
        (None, Blocks, r"has tensor \S+, the model has not; it is a checkpoint of another model"),
        (None, "float32", r"rank-0000\d.safetensors: tensor \S+ is float64, the model's is float32"),
        (None, "scaler", r"was saved without a loss scaler; leave out scaler="),
    ],
)
def test_what_cannot_be_loaded_is_named_and_changes_nothing(damage, model, message, tmp_path):
    _, path, _ = save_from(Zero1, 2, tmp_path)
    if damage:
        damage(path)

    def fn(rank, world_size):
        kind = model if isinstance(model, type) else Counting
        dtype = torch.float32 if model == "float32" else torch.float64
        optimizer = Zero1(kind(dtype, seed=2), **HYPER)
        before = state_of(optimizer)
        try:
            load(path, optimizer, scaler=LossScaler() if model == "scaler" else None)
        except CheckpointError as error:
            return str(error), same(state_of(optimizer), before)
        return "loaded", False

    problems = launch(fn, 3)
    assert len({problem for problem, _ in problems}) == 1  # all ranks say the same
    for problem, unchanged in problems:
        assert unchanged
        assert re.search(message, problem), problem


def test_bad_arguments_are_refused(tmp_path):
    def fn(rank, world_size):
        optimizer, problems = make(DDP), []
        for options in ({"keep": 0}, {"sampler": object()}):
            try:
                save(tmp_path, 1, optimizer, **options)
            except ValueError as error:
                problems.append(str(error))
        return problems

    def complex_buffer(rank, world_size):
        model = Blocks()
        model.register_buffer("turns", torch.zeros(2, dtype=torch.complex64))
        try:
            save(tmp_path, 1, DDP(model))
        except CheckpointError as error:
            return str(error)

    def statistics_of_other_data(rank, world_size):
        model = Blocks()
        model.register_buffer("mean", torch.zeros(3))
        optimizer = DDP(model)
        model.mean += rank
        try:
            save(tmp_path, 1, optimizer)
        except CheckpointError as error:
            return str(error)

    for problem in launch(statistics_of_other_data, 2):
        assert problem.startswith("tensor buffer/mean has other values on rank 1 than on rank 0; if they are copies")
        assert "average it over the ranks before the save" in problem
    (problem, _) = launch(complex_buffer, 2)
    assert problem.startswith("tensor buffer/turns is complex64, which safetensors cannot hold; convert it")
    for keep, sampler in launch(fn, 2):
        assert keep == "keep counts from 1, got 0; leave it out to keep all checkpoints"
        assert sampler.startswith("sampler and config must be such as JSON can hold")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        latest(tmp_path / "nowhere")
    assert saved_steps(tmp_path) == []


def test_ranks_that_disagree_about_a_tensor_are_told(tmp_path):
    def fn(rank, world_size):
        model = nn.Linear(2 + rank, 1)
        alone = lab.Mesh(lab.Topology([("dp", 1), ("tp", 2)])).group("dp")
        try:
            save(tmp_path, 1, DDP(model, alone))
        except CheckpointError as error:
            return str(error)

    assert all("give each its own name with shard_spec_of" in problem for problem in launch(fn, 2))
