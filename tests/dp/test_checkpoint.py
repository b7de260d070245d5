"""Save and load: bitwise on any number of ranks, at any stage, under tp and pp; what is refused, in what words."""

import json
import random
import re
import warnings

import numpy as np
import pytest
import torch
from models import launch
from safetensors.torch import load_file
from test_zero import BATCHES, HYPER, STAGES, Blocks, build, train, whole_weights
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.checkpoint import Checkpoint, CheckpointError, Place, latest, load, save, saved_steps
from dualpipe_lab.dp.checkpoint.exchange import from_torch, to_torch
from dualpipe_lab.dp.ddp import Ddp
from dualpipe_lab.dp.layout import share
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import Options
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.world import comm


class Counting(Blocks):
    """With a buffer, a number, and a buffer that is not saved."""

    def __init__(self, dtype=torch.float64, **options):
        super().__init__(dtype, **options)
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.temperature = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, tokens):
        self.num_batches += 1
        return super().forward(tokens) * self.temperature


def make(stage, dtype=torch.float64, seed=0):
    return build(stage, Counting(dtype, seed=seed), Options(HYPER, master=dtype == torch.bfloat16))


def state_of(optimizer):
    """Everything that counts, whole, by name; the same on every rank."""
    parts = {}
    for held in optimizer.held:
        for kind, tensor in held.adam.state().items():
            for part in held.bucket.layout.between(held.first, held.last):
                parameter = held.bucket.parameters[part.tensor]
                begin = held.bucket.layout.offsets[part.tensor] + part.start - held.first
                values = tensor[begin : begin + part.stop - part.start].clone()
                parts.setdefault((kind, optimizer.names[parameter]), {})[part.start] = values
    merged = {}
    for found in [parts] if not optimizer.is_sharded else comm.all_gather_object(parts):
        for key, pieces in found.items():
            merged.setdefault(key, {}).update(pieces)
    whole = {key: torch.cat([pieces[start] for start in sorted(pieces)]) for key, pieces in merged.items()}
    return whole | whole_weights(optimizer) | {"steps": torch.tensor(optimizer.num_steps)}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def save_all(stages, num_ranks, folder, dtype=torch.float64, num_steps=2):
    """What each stage saved after some steps: its state, the path, the buffer."""

    def fn(rank, world_size):
        found = []
        for stage in stages:
            optimizer = make(stage, dtype)
            train(optimizer, share(6, world_size, rank), BATCHES[:num_steps], 1)
            options = {"sampler": {"batch": 7}, "config": {"lr": 0.01}, "topology": lab.Topology([("dp", world_size)])}
            path = save(folder / stage.__name__, num_steps, optimizer, **options)
            found.append((state_of(optimizer), path, int(optimizer.module.num_batches)))
        return found

    return launch(fn, num_ranks)[0]


def save_from(stage, num_ranks, folder):
    return save_all([stage], num_ranks, folder)[0]


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


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(stage, tmp_path):
    """Weights, moments, step count, loss scale and random numbers all go on."""

    def fn(rank, world_size):
        rows, runs = share(6, world_size, rank), []
        for interrupted in (False, True):
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            optimizer, scaler = make(stage), LossScaler(1024.0, interval=3)
            train(optimizer, rows, BATCHES[:2], 1, scaler=scaler)
            if interrupted:
                path = save(tmp_path, 2, optimizer, scaler=scaler)
                torch.manual_seed(9)
                random.seed(9)
                np.random.seed(9)
                optimizer, scaler = make(stage, seed=3), LossScaler()
                load(path, optimizer, scaler=scaler)
            train(optimizer, rows, BATCHES[2:], 1, scaler=scaler)
            draws = torch.rand(2).tolist(), random.random(), float(np.random.rand())
            runs.append((state_of(optimizer), draws, scaler.state()))
        return same(runs[0][0], runs[1][0]), runs[0][1:] == runs[1][1:], runs[0][2]["scale"]

    assert launch(fn, 3) == [(True, True, 2048.0)] * 3


def test_rounding_at_random_goes_on_too(tmp_path):
    def fn(rank, world_size):
        runs = []
        for interrupted in (False, True):
            optimizer = build(Zero1, Blocks(torch.bfloat16), Options(rounding_seed=3))
            for number in range(3):
                if interrupted and number == 2:
                    path = save(tmp_path, 2, optimizer)
                    optimizer = build(Zero1, Blocks(torch.bfloat16), Options(rounding_seed=3))
                    load(path, optimizer)
                train(optimizer, share(6, world_size, rank), BATCHES[:1], 1)
            runs.append(state_of(optimizer))
        return same(*runs)

    assert launch(fn, 2) == [True, True]


def test_every_element_is_written_once_and_no_pickle(tmp_path):
    for stage in (Ddp, Zero3):
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
        optimizer = make(Ddp)
        load(path, optimizer)
        return whole_weights(optimizer)

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


class Slice(nn.Module):
    """A rank's part of a 7 x 5 weight: rows under tp, or columns; a norm that all tp ranks hold; layers under pp."""

    def __init__(self, tp, tp_size, layers):
        super().__init__()
        whole = torch.arange(35, dtype=torch.float64).view(7, 5)
        self.tp, self.tp_size, self.numbers = tp, tp_size, list(layers)
        self.rows = nn.ParameterList((whole[share(7, tp_size, tp)] + 100 * layer).clone() for layer in layers)
        self.columns = nn.ParameterList((whole[:, share(5, tp_size, tp)] - 100 * layer).clone() for layer in layers)
        self.norm = nn.ParameterList(torch.full((5,), float(layer), dtype=torch.float64) for layer in layers)

    def place_of(self, name, tensor):
        kind, number = name.split(".")
        name = f"layers.{self.numbers[int(number)]}.{kind}"
        if kind == "norm":
            return Place(name)
        axis, size = (0, 7) if kind == "rows" else (1, 5)
        return Place(name, axis, share(size, self.tp_size, self.tp).start, size)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 4, 1), (1, 1, 1), (3, 2, 1), (2, 1, 2), (4, 1, 1)])
def test_a_model_under_tp_and_pp_loads_under_another_topology(tp, pp, dp, tmp_path):
    """Saved by tp 2, pp 2, dp 2 with ZeRO-1 over dp."""

    def build_part(mesh, offset):
        layers = range(4)[share(4, mesh.size("pp"), mesh.rank("pp"))]
        model = Slice(mesh.rank("tp"), mesh.size("tp"), layers)
        for parameter in model.parameters():
            parameter.data += offset
        return model, Zero1(model, mesh.group("dp"))

    def saving(rank, world_size):
        model, optimizer = build_part(lab.Mesh(lab.Topology([("pp", 2), ("dp", 2), ("tp", 2)])), 0)
        save(tmp_path, 1, optimizer, place_of=model.place_of)

    def loading(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("pp", pp), ("dp", dp), ("tp", tp)]))
        model, optimizer = build_part(mesh, 1000)
        load(latest(tmp_path), optimizer, place_of=model.place_of)
        expected = build_part(mesh, 0)[0]
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))

    launch(saving, 8)
    assert launch(loading, tp * pp * dp) == [True] * (tp * pp * dp)
    rows = Checkpoint(latest(tmp_path)).read("parameter/layers.3.columns")
    assert torch.equal(rows, torch.arange(35, dtype=torch.float64).view(7, 5) - 300)


def test_old_checkpoints_go_and_a_step_is_saved_once(tmp_path):
    def fn(rank, world_size):
        optimizer = make(Zero1)
        for step in range(1, 6):
            save(tmp_path, step, optimizer, keep=2)
        try:
            save(tmp_path, 5, optimizer)
        except CheckpointError as error:
            return str(error)

    (tmp_path / ".saving-step-00000001").mkdir()  # of a run that died
    problems = launch(fn, 2)
    assert saved_steps(tmp_path) == [4, 5]
    assert latest(tmp_path).name == "step-00000005"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    assert all("step-00000005 is there already; remove it" in problem for problem in problems)


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
        optimizer = Zero1(kind(dtype, seed=2), options=Options(HYPER))
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
        optimizer, problems = make(Ddp), []
        for options in ({"keep": 0}, {"sampler": object()}):
            try:
                save(tmp_path, 1, optimizer, **options)
            except ValueError as error:
                problems.append(str(error))
        return problems

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
            save(tmp_path, 1, Ddp(model, alone))
        except CheckpointError as error:
            return str(error)

    assert all("give each its own name with place_of" in problem for problem in launch(fn, 2))
