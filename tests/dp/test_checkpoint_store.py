"""Checkpoints in an object store: written by all ranks, read in ranges, whole or not there, whatever dies."""

import pickle
import sys

import pytest
import torch
from models import launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.checkpoint import Checkpoint, CheckpointError, latest, load, save, saved_steps, session
from dualpipe_lab.dp.checkpoint.store import StorePath, place_of
from dualpipe_lab.dp.sharded import ZeroOptions
from dualpipe_lab.dp.zero1 import Zero1

WIDTH = 50


def make(value):
    model = nn.Linear(WIDTH, 30, bias=False)
    nn.init.constant_(model.weight, value)
    return Zero1(model, options=ZeroOptions())


@pytest.fixture
def address(tmp_path):
    """A store that several processes reach: files through fsspec, where nothing is renamed."""
    return f"file://{tmp_path}/runs/first"


def saves(rank, world_size, address, steps, keep=None):
    for step in steps:
        optimizer = make(float(step))
        made = save(address, step, optimizer, sampler={"place": step}, keep=keep)
    return made


def test_ranks_save_into_a_store_and_other_ranks_load_from_it(address):
    made = launch(saves, 3, address, [1, 2, 4], 2)
    assert list(made) == [StorePath(f"{address}/step-00000004")] * 3
    assert saved_steps(address) == [2, 4]
    assert latest(address) == made[0]

    def loads(rank, world_size):
        optimizer = make(0.0)
        restored = load(latest(address), optimizer)
        return restored.step, restored.sampler, optimizer.module.weight.unique().tolist(), len(restored.reads)

    for num_ranks in (1, 2):
        for step, sampler, weights, num_reads in launch(loads, num_ranks):
            assert (step, sampler, weights) == (4, {"place": 4}, [4.0])
            assert num_reads > 0
    weight = Checkpoint(f"{address}/step-00000002").read("parameter/weight")
    assert torch.equal(weight, torch.full((30, WIDTH), 2.0))


def test_a_rank_reads_its_own_bytes_from_the_store_and_no_others(address):
    launch(saves, 2, address, [1])

    def loads(rank, world_size):
        optimizer = make(0.0)
        return sum(read.end - read.begin for read in load(latest(address), optimizer).reads)

    assert list(launch(loads, 2)) == [4 * WIDTH * 30 * 3 // 2] * 2  # halves of the weight and of its two moments


def test_a_save_that_dies_leaves_the_one_before(address):
    """A rank, and then rank 0 before its index; the next save of that step clears away what they have left."""
    launch(saves, 2, address, [1])

    def dies(rank, world_size, victim):
        if rank == victim:
            name = "_write" if victim else "_finish"
            setattr(session, name, lambda *arguments: sys.exit(3))
        saves(rank, world_size, address, [2])

    for victim in (1, 0):
        with pytest.raises(lab.RankError):
            launch(dies, 2, victim)
        assert saved_steps(address) == [1]
        assert (place_of(address) / "step-00000002").is_dir()
    launch(saves, 3, address, [2])
    assert saved_steps(address) == [1, 2]
    assert sorted((latest(address)).names()) == ["index.json", *(f"rank-0000{rank}.safetensors" for rank in range(3))]


def test_a_file_of_another_save_is_told(address):
    """Such as one that a rank of a dead save writes late."""
    launch(saves, 2, address, [1])
    path = latest(address)
    late = (path / "rank-00001.safetensors").open("rb").read()
    (path / "index.json").remove()
    launch(saves, 2, address, [1])
    with (path / "rank-00001.safetensors").open("wb") as file:
        file.write(late)
    with pytest.raises(CheckpointError, match="of another save"):
        Checkpoint(path).verify()


def test_what_is_there_already_or_not_to_be_reached_is_told(address):
    launch(saves, 1, address, [1])
    with pytest.raises(lab.RankError, match="step-00000001 is there already; remove it"):
        launch(saves, 2, address, [1])
    with pytest.raises(CheckpointError, match="there is no checkpoint in memory://nothing"):
        latest("memory://nothing")
    with pytest.raises(ValueError, match="nowhere://a names a store that this installation does not reach"):
        place_of("nowhere://a")


def test_a_place_in_a_store_is_like_a_path():
    place = StorePath("memory://some/runs/")
    assert (str(place / "a"), (place / "a").name, (place / "a").parent) == ("memory://some/runs/a", "a", place)
    assert pickle.loads(pickle.dumps(place)) == place
    assert len({place, StorePath("memory://some/runs")}) == 1
    assert not place.is_dir()
    assert place.names() == []
    (place / "a").write_text("é")
    assert ((place / "a").read_text(), (place / "a").stat().st_size, place.names()) == ("é", 2, ["a"])
    assert (place / "a").is_file()
    assert not (place / "b").is_file()
    place.remove()
    assert not place.is_dir()
