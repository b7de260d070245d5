"""Save and load: bitwise on any number of ranks, at any stage; consolidated, exchanged with torch, rotated."""

import json
import os
import random
import shutil
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch
from checkpoint_runs import Counting, make, same, save_all, save_from, state_of
from models import launch
from safetensors.torch import load_file
from zero_runs import BATCHES, HYPER, STAGES, build, train

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab._private import plain_name
from dualpipe_lab.dp.checkpoint import Checkpoint, CheckpointError, latest, load, save, saved_steps
from dualpipe_lab.dp.checkpoint.reader import checksum_of
from dualpipe_lab.dp.checkpoint.session import write_checkpoint
from dualpipe_lab.dp.checkpoint.torch_format import from_torch, to_torch, write_torch
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.sharding import shard_slice


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_four_ranks_load_as_one_two_three_or_eight_at_any_stage(dtype, tmp_path):
    saved = save_all(STAGES, 4, tmp_path, dtype)

    def fn(rank, world_size):
        found = []
        for at, (_, path, _) in enumerate(saved):
            for stage in dict.fromkeys(
                [STAGES[at], STAGES[(at + world_size) % 4]]
            ):  # the stage that saved, and another one
                optimizer = make(stage, dtype, seed=5)  # other weights, which the checkpoint replaces
                restored = load(path, optimizer)
                found.append((at, state_of(optimizer), restored, int(optimizer.module.num_batches)))
        return found

    for num_ranks in (1, 2, 3, 8):
        for found in launch(fn, num_ranks):
            assert len(found) == (4 if num_ranks == 8 else 8)
            for at, state, restored, count in found:
                assert same(state, saved[at][0])
                assert (restored.step, restored.sampler, restored.config) == (2, {"batch": 7}, {"lr": 0.01})
                assert restored.topology == lab.Topology([("dp", 4)])
                assert count == saved[at][2]


RESUMED = [(stage, {}) for stage in STAGES] + [(Zero1, {"rounding_seed": 3})]


@pytest.mark.parametrize(("stage", "options"), RESUMED)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(stage, options, tmp_path):
    """Weights, moments, step count, loss scale and random numbers all go on, those of a rounding too."""

    def made(seed):
        return build(stage, Counting(torch.bfloat16 if options else torch.float64, seed=seed), HYPER | options)

    def fn(rank, world_size):
        rows, runs = shard_slice(6, world_size, rank), []
        for interrupted in (False, True):
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            optimizer, scaler = made(0), LossScaler(1024.0, interval=3)
            train(optimizer, rows, BATCHES[:2], 1, scaler=scaler)
            if interrupted:
                path = save(tmp_path, 2, optimizer, scaler=scaler)
                torch.manual_seed(9)
                random.seed(9)
                np.random.seed(9)
                optimizer, scaler = made(3), LossScaler()
                load(path, optimizer, scaler=scaler)
            train(optimizer, rows, BATCHES[2:], 1, scaler=scaler)
            draws = torch.rand(2).tolist(), random.random(), float(np.random.rand())
            runs.append((state_of(optimizer), draws, scaler.state_dict()))
        return same(runs[0][0], runs[1][0]), runs[0][1:] == runs[1][1:], runs[0][2]["scale"]

    assert launch(fn, 3) == [(True, True, 2048.0)] * 3


def test_every_element_is_written_once_and_no_pickle(tmp_path):
    for stage in (DDP, Zero3):
        state, path, _ = save_from(stage, 3, tmp_path / stage.__name__)
        files = sorted(file.name for file in path.iterdir())
        assert files == ["index.json", *(f"rank-{rank:05d}.safetensors" for rank in range(3))]
        json.loads((path / "index.json").read_text())
        stored = sum(tensor.numel() for file in path.glob("*.safetensors") for tensor in load_file(file).values())
        trained = sum(state["exp_avg", name].numel() for kind, name in [key for key in state if key[0] == "exp_avg"])
        assert stored == 3 * trained + 5 + 1  # a frozen bias of 5, a buffer of one number


def test_consolidation_is_one_plain_file(tmp_path):
    _, path, _ = save_from(Zero3, 4, tmp_path)
    Checkpoint(path).consolidate(tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")

    def fn(rank, world_size):
        optimizer = make(DDP)
        load(path, optimizer)
        return full_weights(optimizer)

    (expected,) = launch(fn, 1)
    assert same(weights, expected)
    assert weights["temperature"].shape == ()
    assert not list(tmp_path.glob(".saving*"))


def test_torch_checkpoints_in_both_directions(tmp_path):
    expected, path, _ = save_from(Zero2, 2, tmp_path / "ours")
    to_torch(path, tmp_path / "theirs")
    theirs = {"parameter/embedding.weight": torch.empty(7, 5, dtype=torch.float64)}
    with warnings.catch_warnings(action="ignore"):
        torch.distributed.checkpoint.load(theirs, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
        torch.distributed.checkpoint.save({"w": torch.ones(3)}, checkpoint_id=str(tmp_path / "foreign"), no_dist=True)
    assert torch.equal(theirs["parameter/embedding.weight"], expected["embedding.weight"])
    back = from_torch(tmp_path / "theirs", tmp_path / "back")

    def fn(rank, world_size):
        optimizer = make(Zero3, seed=4)
        return load(back, optimizer).sampler, state_of(optimizer)

    for sampler, state in launch(fn, 3):
        assert sampler == {"batch": 7}
        assert same(state, expected)
    with pytest.raises(CheckpointError, match="does not say its step"):
        from_torch(tmp_path / "foreign", tmp_path / "back")
    foreign = from_torch(tmp_path / "foreign", tmp_path / "back", 5, lambda name: f"parameter/{name}")
    assert Checkpoint(foreign).read("parameter/w").tolist() == [1.0] * 3


class Buffer(bytearray):
    """Bytes whose end can be watched."""


@pytest.mark.parametrize("form", ["ours", "theirs"])
def test_a_tensor_is_dropped_before_the_one_after_the_next_is_read(form, tmp_path):
    held, most = [], 0

    def read(name):
        nonlocal most
        most = max(most, sum(buffer() is not None for buffer in held))
        buffer = Buffer(80)
        held.append(weakref.ref(buffer))
        return torch.frombuffer(buffer, dtype=torch.float64)

    kinds = {str(number): (torch.float64, (10,)) for number in range(6)}
    if form == "ours":
        write_checkpoint(tmp_path / "folder", 0, kinds, read, {})
    else:
        write_torch(tmp_path / "folder", kinds, read)
    assert len(held) == 6
    assert most == (0 if form == "ours" else 1)  # while another one is read


def test_old_checkpoints_go_and_a_step_is_saved_once(tmp_path):
    """Steps 7 and 20 are of a run that was taken back to step 7: keep=1 must not remove the new step 15."""
    steps = [(1, 2), (2, 2), (7, 2), (20, None), (15, 1)]

    def fn(rank, world_size):
        optimizer, found = make(Zero1), []
        for step, keep in steps:
            save(tmp_path, step, optimizer, keep=keep)
            found.append(saved_steps(tmp_path))
            comm.barrier()
        with pytest.raises(CheckpointError, match="step-00000015 is there already; remove it"):
            save(tmp_path, 15, optimizer)
        return found

    (tmp_path / ".saving-step-00000001").mkdir()  # of a run that died
    assert launch(fn, 2) == [[[1], [1, 2], [2, 7], [2, 7, 20], [15, 20]]] * 2
    assert latest(tmp_path).name == "step-00000020"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]


def test_a_disk_that_refuses_the_last_rename_stops_all_ranks(tmp_path):
    def fn(rank, world_size):
        def refuse(*args):
            raise OSError("no space left")

        os.rename = refuse
        try:
            save(tmp_path, 1, make(Zero1))
        except CheckpointError as error:
            return str(error)

    assert launch(fn, 2) == ["no space left"] * 2
    assert saved_steps(tmp_path) == []


def test_a_rank_reads_its_own_bytes_and_no_others(tmp_path):
    """From 4 ranks to 3: the bytes of the moments are read once, by one rank each, and no others."""
    save_from(Zero3, 4, tmp_path)

    def fn(rank, world_size):
        return load(latest(tmp_path / "Zero3"), make(Zero3)).reads

    reads = launch(fn, 3)
    files = {file.name: file.read_bytes() for file in latest(tmp_path / "Zero3").iterdir() if file.suffix != ".json"}
    for own in reads:
        assert all(0 < read.begin < read.end <= len(files[read.file]) for read in own)
    moments = [read for own in reads for read in own if read.tensor.startswith("exp_avg/")]
    assert sum(read.end - read.begin for read in moments) == 8 * sum(
        tensor.numel()
        for file in latest(tmp_path / "Zero3").glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if name.startswith("exp_avg/")
    )


GROUPS = {"matrices": {"lr": 0.02, "weight_decay": 0.3}, "rest": {"lr": 0.001, "weight_decay": 0.0}}


def listed(model, order, moved=()):
    """Param groups of the matrices and of all else, in an order; parameters of the names in `moved` change places."""
    found = {name: [] for name in GROUPS}
    for name, parameter in model.named_parameters():
        found["matrices" if (parameter.dim() > 1) != (name in moved) else "rest"].append(parameter)
    return [{"params": found[name], **GROUPS[name]} for name in order]


def compiled(model, how):
    """The model as `how` says, to train; the parameters stay the same."""
    if how == "inner":
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return torch.compile(model, backend="eager") if how == "whole" else model


ORDERS = ("matrices", "rest"), ("rest", "matrices")
MOVED = r"saved with other param groups: temperature was not in one with the others of group [01]; give params="


@pytest.mark.parametrize(("before", "after"), [(DDP, Zero3), (Zero1, Zero2), (Zero3, DDP)])
def test_groups_are_found_by_the_names_of_their_parameters_and_a_compiled_model_has_those_of_the_plain_one(
    before, after, tmp_path
):
    """Saved by 2 ranks, loaded by 2 with the groups in another order: the next steps are those of the first run."""

    def train_on(optimizer, batches):
        rows = shard_slice(6, 2, comm.get_rank())
        train(optimizer, rows, batches, 1)
        return {plain_name(name): weight for name, weight in full_weights(optimizer).items()}

    def fn(rank, world_size):
        model = Counting()
        first = before(compiled(model, "whole"), params=listed(model, ORDERS[0]))
        train_on(first, BATCHES[:2])
        path = save(tmp_path, 2, first)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys.modules["dualpipe_lab.dp.param_specs"], "plain_name", str
            )  # as those were saved that are older
            old = save(tmp_path / "old", 2, first)
        right = train_on(first, BATCHES[2:4])
        for how, order, found in (("", ORDERS[1], path), ("inner", ORDERS[0], path), ("", ORDERS[0], old)):
            other = Counting(seed=3)
            second = after(compiled(other, how), params=listed(other, order))
            load(found, second)
            assert [group["lr"] for group in second.param_groups] == [GROUPS[name]["lr"] for name in order]
            ours = train_on(second, BATCHES[2:4])
            assert ours.keys() == right.keys()
            assert all(torch.allclose(ours[name], right[name], atol=1e-14, rtol=0) for name in right)
        third = after(other := Counting(seed=4), params=listed(other, ORDERS[1], moved={"temperature"}))
        with pytest.raises(CheckpointError, match=MOVED):
            load(path, third)

    launch(fn, 2, timeout=240)


def test_a_checkpoint_of_several_groups_without_names_is_loaded_in_order_and_says_so(tmp_path):
    """As those were saved that are older."""

    def fn(rank, world_size):
        model = Counting()
        path = save(tmp_path, 1, Zero1(model, params=listed(model, ORDERS[0])))
        index = json.loads((path / "index.json").read_text())
        for group in index["values"]["param_groups"]:
            del group["param_names"]
        index["values_checksum"] = checksum_of(index["values"])
        (path / "index.json").write_text(json.dumps(index))
        second = Zero1(model, params=listed(model, ORDERS[0]), lr=0.5)
        with pytest.warns(UserWarning, match="does not say which parameters are in its 2 param groups"):
            load(path, second)
        return [group["lr"] for group in second.param_groups]

    assert launch(fn, 1)[0] == [0.02, 0.001]


def test_a_folder_of_another_name_or_without_its_index_is_not_gone_on_from(tmp_path):
    def fn(rank, world_size):
        optimizer = make(Zero1)
        for step in (1, 3):
            save(tmp_path, step, optimizer)
        shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000050")
        for path in (tmp_path / "step-00000050", latest(tmp_path)):
            with pytest.raises(CheckpointError, match=r"one of step 1; name it step-00000001, or move it out"):
                load(path, optimizer)
        shutil.copytree(tmp_path / "step-00000001", tmp_path / "kept")
        assert load(tmp_path / "kept", optimizer).step == 1

    launch(fn, 1)
    (tmp_path / "step-00000050" / "index.json").unlink()
    words = (
        r"step-00000050 is incomplete, index.json is missing; remove it or .* \(the one before it is .*step-00000003\)"
    )
    with pytest.raises(CheckpointError, match=words):
        latest(tmp_path)
    for name in ("step-000000060", "step-60", "step-٠٠٠٠٠٠٩٩", "step-00000060.bak"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    shutil.rmtree(tmp_path / "step-00000050")
    assert latest(tmp_path).name == "step-00000003"
