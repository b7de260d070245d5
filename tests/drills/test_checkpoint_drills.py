"""Drills of checkpoints: two savers in one folder, flipped bits, truncations, edited indices, kills, separate folders.

Whatever happens, what loads is one save, whole; and what does not load says which file and which tensor.
"""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.checkpoint import Checkpoint, CheckpointError, folder, latest, load, save, saved_steps
from dualpipe_lab.dp.zero1 import Zero1

NUM_RANKS = 2


def make(value, width=5):
    model = nn.Linear(width, 300, bias=False)
    nn.init.constant_(model.weight, value)
    return Zero1(model)


def save_all(path, step, value, width=5, num_ranks=NUM_RANKS):
    """Save a model whose weights are all `value`; returns what each rank was told."""

    def fn(rank, world_size):
        try:
            save(path, step, make(float(value), width), config={"value": value})
        except CheckpointError as error:
            return str(error)
        return "saved"

    return lab.launch(fn, num_ranks, output="collect")


def check_whole(path):
    """One save, whole: weights and config are of one value, which it returns."""
    checkpoint = Checkpoint(path)
    weight = checkpoint.read("parameter/weight")
    checkpoint.verify()
    assert torch.equal(weight, torch.full_like(weight, float(checkpoint.index.values["config"]["value"])))
    return checkpoint.index.values["config"]["value"]


# ---- two savers
@pytest.mark.parametrize("steps", [(2, 2), (2, 3)], ids=["one step", "two steps"])
def test_two_savers_at_once_are_told_and_nothing_is_mixed(tmp_path, steps):
    """Both start within the same moments; whoever is refused is told why on all ranks."""
    place = tmp_path / "saves"
    save_all(place, 1, 10)
    told = [None, None]

    def run(which):
        told[which] = list(save_all(place, steps[which], 20 + which, width=6_000))

    threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(set(words)) == 1 for words in told)  # all ranks of a save are told the same
    saved = [which for which in range(2) if told[which][0] == "saved"]
    assert saved
    for words in told:
        assert (
            words[0] == "saved"
            or words[0].startswith(f"another save is under way in {place}; ")
            or "is there already" in words[0]
        ), words
    assert check_whole(place / folder.name_of(1)) == 10
    for which in saved:
        assert check_whole(place / folder.name_of(steps[which])) == 20 + which
    assert saved_steps(place) == sorted({1, *(steps[which] for which in saved)})
    assert sorted(os.listdir(place)) == [folder.name_of(step) for step in saved_steps(place)]


def test_a_save_under_way_is_named_on_all_ranks_and_stays_whole(tmp_path):
    with folder.locked(tmp_path):
        hidden = tmp_path / folder.begin(tmp_path, 3)
        (told,) = set(save_all(tmp_path, 4, 1))
        assert told == (f"another save is under way in {tmp_path}; wait until it is done, or save into another folder")
        assert hidden.is_dir()
    assert set(save_all(tmp_path, 4, 1)) == {"saved"}
    assert os.listdir(tmp_path) == [folder.name_of(4)]


def test_the_lock_of_a_dead_process_keeps_nobody_out(tmp_path):
    def die(rank, world_size):
        with folder.locked(tmp_path):
            folder.begin(tmp_path, 1)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(lab.RankError, match="SIGKILL"):
        lab.launch(die, 1)
    assert len(os.listdir(tmp_path)) == 2  # the lock's file and the hidden folder
    assert set(save_all(tmp_path, 1, 7)) == {"saved"}
    assert check_whole(latest(tmp_path)) == 7
    assert os.listdir(tmp_path) == [folder.name_of(1)]


def test_a_lock_that_its_holder_removes_is_taken_anew(tmp_path):
    """Whoever opened the old lock's file before it was removed must not believe that it holds the new one."""
    opened = os.open(tmp_path / ".saving.lock", os.O_CREAT | os.O_RDWR)
    (tmp_path / ".saving.lock").unlink()
    fcntl.flock(opened, fcntl.LOCK_EX)
    refused = pytest.raises(CheckpointError, match="another save is under way")
    with folder.locked(tmp_path), refused, folder.locked(tmp_path):
        pass
    os.close(opened)
    assert os.listdir(tmp_path) == []


def test_without_locks_of_the_file_system_two_saves_are_not_mixed(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(45 if os.uname().sysname == "Darwin" else 95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with folder.locked(tmp_path), folder.locked(tmp_path):
        first, second = (tmp_path / folder.begin(tmp_path, 2) for _ in range(2))
    assert first != second
    assert not first.exists()


def test_a_folder_that_is_not_shared_is_told(tmp_path):
    def fn(rank, world_size):
        own = tmp_path / f"node{rank // 2}"  # two ranks on each of two nodes
        try:
            save(own, 1, make(1.0))
        except CheckpointError as error:
            return str(error)

    (told,) = set(lab.launch(fn, 4))
    assert "node1 is not shared: rank 0 made .saving-step-00000001-" in told
    assert "rank 2 does not see that; save into a folder that all ranks share" in told
    assert os.listdir(tmp_path / "node0")[0].startswith(".saving-")  # for the next save to clear away


# ---- damage


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    path = tmp_path_factory.mktemp("intact")
    assert set(save_all(path, 3, 3, num_ranks=3)) == {"saved"}
    return latest(path)


def content(path):
    """Everything that a checkpoint says, or its error."""
    try:
        checkpoint = Checkpoint(path)
        tensors = {name: checkpoint.read(name).numpy().tobytes() for name in checkpoint.names()}
        checkpoint.verify()
    except CheckpointError as error:
        return str(error)
    return checkpoint.step, tensors, checkpoint.index.values


@pytest.mark.parametrize("part", ["index", "header", "data"])
def test_no_flipped_bit_loads_as_something_else(intact, tmp_path, part):
    draw = random.Random(7)
    damaged = tmp_path / "damaged"
    shutil.copytree(intact, damaged)
    expected, outcomes = content(intact), []
    assert not isinstance(expected, str)
    for _ in range(150):
        file = damaged / ("index.json" if part == "index" else f"rank-0000{draw.randrange(3)}.safetensors")
        whole = file.read_bytes()
        data = 8 + int.from_bytes(whole[:8], "little") if part != "index" else len(whole)
        place = draw.randrange(data, len(whole)) if part == "data" else draw.randrange(data)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        found = content(damaged)
        assert isinstance(found, str) or found == expected, (place, whole[max(0, place - 40) : place + 40])
        outcomes.append(isinstance(found, str))
        file.write_bytes(whole)
    assert sum(outcomes) > (149 if part == "data" else 100)  # spaces of the JSON may flip without a difference


def cut(name, share):
    """Leave so much of a file."""
    return lambda path: os.truncate(path / name, int(share * (path / name).stat().st_size))


def written(data):
    return lambda path: (path / "index.json").write_bytes(data)


def replaced(old, new):
    """Other text of the same length in the file of rank 1."""

    def act(path):
        file = path / "rank-00001.safetensors"
        assert old in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(old, new))

    return act


def swap(path):
    """As a copy that mixes up names would: both files are of equal length."""
    first, second = (path / f"rank-0000{rank}.safetensors" for rank in range(2))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)


def edited(change):
    """Change the index: `change` takes the entry of the weight, and all of the index."""

    def act(path):
        index = json.loads((path / "index.json").read_text())
        change(index["tensors"]["parameter/weight"], index)
        (path / "index.json").write_text(json.dumps(index))

    return act


def piece(at, value):
    """Another number of the weight's first shard."""
    return edited(lambda weight, index: weight["pieces"][0].__setitem__(at, value))


def weight(**values):
    """Other values of the weight."""
    return edited(lambda weight, index: weight.update(values))


INDEX = r"index\.json is damaged "
RANK_1 = r"rank-00001\.safetensors: tensor parameter/weight cannot be read "
WEIGHT = r"index\.json.* parameter/weight"
DAMAGE = {
    **{
        f"{share} of {name}": (cut(name, share), rf"{name} (has \d+ bytes of \d+, so tensor|is damaged)")
        for name in ("index.json", "rank-00000.safetensors", "rank-00002.safetensors")
        for share in (0.0, 0.6, 0.999)
    },
    "a lost file": (lambda path: (path / "rank-00001.safetensors").unlink(), r"rank-00001\.safetensors is missing, so"),
    "a lost index": (lambda path: (path / "index.json").unlink(), r"index\.json is missing, so .* is no checkpoint"),
    "nested brackets": (written(b"[" * 100_000), INDEX),
    "foreign text": (written(b"\xff\xfe"), INDEX),
    "half of the braces": (written(b"{"), INDEX + r"\(JSONDecodeError"),
    "null": (written(b"null"), INDEX + r"\(TypeError"),
    "another format": (written(b'{"format": 0}'), INDEX + r"\(ValueError: format 0"),
    "a format alone": (written(b'{"format": "dualpipe-lab checkpoint 2"}'), INDEX + r"\(KeyError"),
    "no steps": (edited(lambda weight, index: index["values"].pop("num_steps")), INDEX + r"\(KeyError: 'num_steps'\)"),
    "other random numbers": (
        edited(lambda weight, index: index["values"]["random"][0]["python"][1].__setitem__(5, 7)),
        INDEX + ".*random numbers included, differ from their checksum",
    ),
    "files that are swapped": (swap, r"rank-0000\d.safetensors: .* \(it says that it is .*do not mix checkpoints"),
    "a file of another step": (replaced(b'"step": "3"', b'"step": "4"'), RANK_1 + r"\(.*'step': '4'.*'step': '3'"),
    "a type of equal width": (replaced(b'"F32"', b'"I32"'), RANK_1 + r"\(it has \d+ bytes of int32, the index says"),
    "a lost piece": (edited(lambda weight, index: weight["pieces"].pop()), "parameter/weight are in none of its files"),
    "negative length": (weight(shape=[300, -5]), WEIGHT),
    "length that is text": (weight(shape=["300", 5]), WEIGHT),
    "shape that is text": (weight(shape="35"), WEIGHT),
    "shape that is huge": (weight(shape=[10**18, 10**18]), WEIGHT),
    "function as dtype": (weight(dtype="load"), WEIGHT),
    "unknown dtype": (weight(dtype="nosuch"), WEIGHT),
    "dtype that is no text": (weight(dtype=[1]), WEIGHT),
    "axis out of range": (piece(1, 9), WEIGHT),
    "negative axis": (piece(1, -1), WEIGHT),
    "empty slice": (piece(3, 0), WEIGHT),
    "end before begin": (piece(5, -1), WEIGHT),
    "broken number": (piece(4, 0.5), WEIGHT),
    "too few numbers": (edited(lambda weight, index: weight["pieces"][0].pop()), WEIGHT),
    "overlap and gap": (
        edited(lambda weight, index: weight["pieces"][0].__setitem__(slice(4, 6), weight["pieces"][1][4:6])),
        "tensor parameter/weight",
    ),
    "other file": (piece(0, "../../x.safetensors"), WEIGHT),
    "no name of a file": (piece(0, 3), WEIGHT),
    "other checksum": (piece(6, 1), "tensor parameter/weight cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_with_file_and_tensor(intact, tmp_path, name):
    act, message = DAMAGE[name]
    damaged = tmp_path / "damaged"
    shutil.copytree(intact, damaged)
    act(damaged)
    found = content(damaged)
    assert isinstance(found, str)
    assert re.search(message, found), found


def test_a_file_of_another_save_of_the_same_step_is_told(intact, tmp_path):
    save_all(tmp_path, 3, 4, num_ranks=3)
    damaged = latest(tmp_path)
    shutil.copy(intact / "rank-00002.safetensors", damaged)
    assert "{'step': '3', 'file': 'rank-00002.safetensors'} of another save, the index means" in content(damaged)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_flipped_bit_stops_all_ranks_however_many_load(intact, tmp_path, num_ranks):
    """3 ranks read whole pieces; 2 read parts of pieces, which say nothing about the others' bits."""
    damaged = tmp_path / "damaged"
    shutil.copytree(intact, damaged)
    file = damaged / "rank-00001.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-3] ^= 16
    file.write_bytes(whole)

    def fn(rank, world_size):
        optimizer, told = make(9.0), ""
        try:
            load(damaged, optimizer)
        except CheckpointError as error:
            told = str(error)
        return told, bool((optimizer.local_shards[0].optimizer.weight == 9.0).all())

    found = lab.launch(fn, num_ranks)
    ((told, unchanged),) = set(found)
    assert unchanged
    assert "rank-00001.safetensors: tensor " in told
    assert "cannot be read (its bytes differ from their checksum)" in told


# ---- kills
@pytest.mark.parametrize("victim", range(NUM_RANKS))
def test_every_call_that_changes_the_disk(victim, tmp_path):
    """Death right before the first, second, ... such call of a save that also removes an old checkpoint."""

    def fn(rank, world_size, step, fatal):
        optimizer, calls = make(float(step)), []

        def deadly(call):
            def wrapped(*args, **options):
                calls.append(call.__name__)
                if rank == victim and len(calls) == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **options)

            return wrapped

        for name in ("rename", "fsync", "mkdir", "unlink", "rmdir"):
            setattr(os, name, deadly(getattr(os, name)))
        save(tmp_path, step, optimizer, keep=1, config={"value": step})
        return calls

    (first, second) = lab.launch(fn, NUM_RANKS, 1, 0)
    assert {"mkdir", "fsync", "rename"} <= set(first)
    assert second.count("fsync") == 1
    step, outcomes = 1, []
    for fatal in range(1, 40):
        try:
            lab.launch(fn, NUM_RANKS, step + 1, fatal)
        except lab.RankError:
            found = check_whole(latest(tmp_path))
            assert found in (step, step + 1)
            outcomes.append(found - step)
            step = found
        else:
            break  # the save made fewer calls than that
    assert set(outcomes) == ({0, 1} if victim == 0 else {0})  # rank 0 renames, so it can die after that, too
    assert len(outcomes) >= (8 if victim == 0 else 1)
    assert check_whole(latest(tmp_path)) == step + 1


def test_a_file_of_another_program_in_the_folder_stays(tmp_path):
    (tmp_path / ".saving-model.safetensors").write_text("being written")
    assert set(save_all(tmp_path, 1, 2)) == {"saved"}
    assert (tmp_path / ".saving-model.safetensors").exists()
    assert Path(latest(tmp_path)).name == folder.name_of(1)
