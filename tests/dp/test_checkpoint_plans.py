"""A checkpoint reads from the modules which part of the full model a rank has: experts, tp, stages, copies of them."""

from itertools import combinations, product

import pytest
import torch
from declared_model import KINDS, biases, build, mesh_of, step
from models import launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.dp.checkpoint import Checkpoint, CheckpointError, ShardSpec, latest, load, save
from dualpipe_lab.dp.sharded import full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.models import LlamaConfig, build_stages
from dualpipe_lab.pp import schedules
from dualpipe_lab.sharding import shard_slice

PLANS = {
    "dp 2 x ep 2": ([("dp", 2), ("ep", 2)], False),
    "ep 4": ([("ep", 4)], False),
    "ep 2 x tp 2": ([("ep", 2), ("tp", 2)], False),
    "pp 2 x dp 2": ([("pp", 2), ("dp", 2)], False),
    "pp 2 x ep 2, mirrored": ([("pp", 2), ("ep", 2)], True),
}
ONE = {"one rank": ([("dp", 1)], False)}


def saving(rank, world_size, folder):
    """Two steps on each plan with each kind of optimizer, then a checkpoint."""
    for name, (axes, mirrored) in PLANS.items():
        mesh = mesh_of(axes)
        for kind in KINDS:
            _, optimizer = build(kind, mesh, mirrored)
            for number in range(2):
                step(optimizer, number)
            save(folder / kind / name, 2, optimizer)


def one_rank(rank, world_size):
    """What a checkpoint of one rank holds after two steps, and its weights after two and after three."""
    model, optimizer = build("DDP", mesh_of([("dp", 1)]))
    for number in range(2):
        step(optimizer, number)
    names = {parameter: said.name for parameter, said in optimizer.spec.parameters.items()}
    state = {f"buffer/{name}": bias.clone() for name, bias in biases(model).items()}
    for held in optimizer.local_shards:
        for kind, flat in held.optimizer.state_dict().items():
            for parameter, view in zip(held.bucket.parameters, held.bucket.views(flat), strict=True):
                state[f"{kind}/{names[parameter]}"] = view.clone()
    step(optimizer, 2)
    return state, {f"parameter/{names[p]}": p.detach().clone() for p in model.parameters()}


def meetings(plans):
    """Target's plan and kind, saver's plan and kind: of these four, any two meet in all 25 combinations, each once."""
    savers, kinds = [*PLANS], [*KINDS]
    for (at, plan), (number, kind) in product(enumerate(plans), enumerate(kinds)):
        yield plan, kind, savers[(at + number) % len(savers)], kinds[(at + 2 * number) % len(kinds)]


def loading(rank, world_size, folder, plans, state, stepped):
    """Whether each checkpoint gives the weights and biases of two steps, and after a third one those of three."""
    found, meshes = {}, {plan: mesh_of(axes) for plan, (axes, _) in plans.items()}
    for plan, kind, name, saver in meetings(plans):
        model, optimizer = build(kind, meshes[plan], plans[plan][1], seed=7)
        load(latest(folder / saver / name), optimizer)
        same = [optimizer.num_steps == 2, holds(optimizer, state)]
        same.append(all(torch.equal(bias, state[f"buffer/{name}"]) for name, bias in biases(model).items()))
        step(optimizer, 2)  # the moments count here
        found[plan, kind, name, saver] = [*same, holds(optimizer, stepped)]
    return found


def holds(optimizer, state):
    """Whether each weight is this rank's part of the full one."""
    expected = {}
    for parameter, said in optimizer.spec.parameters.items():
        full = state[f"parameter/{said.name}"]
        expected[optimizer.names[parameter]] = full if said.shard is None else said.shard.of(full)
    return equal(full_weights(optimizer), expected)


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of every plan and kind of optimizer."""
    folder = tmp_path_factory.mktemp("plans")
    launch(saving, 4, folder, timeout=480)
    return folder


@pytest.fixture(scope="module")
def reference():
    """The model on one rank, after two steps and after three."""
    return launch(one_rank, 1)[0]


def test_every_plan_goes_on_from_the_checkpoint_of_every_other(folder, reference):
    """Bitwise: gradients are drawn by name, so every plan has the same arithmetic."""
    for num_ranks, plans in ((4, PLANS), (1, ONE)):
        for found in launch(loading, num_ranks, folder, plans, *reference, timeout=480):
            assert len(found) == len(plans) * len(KINDS)
            assert all(all(same) for same in found.values()), found
    columns = zip(*meetings(PLANS), strict=True)
    assert all(len({*zip(*two, strict=True)}) == 25 for two in combinations(columns, 2))


def test_a_checkpoint_has_the_full_model_once(folder, reference):
    """Names, shapes and moments are those of one rank, and each selection bias is in one file."""
    state, _ = reference
    assert {name.split("/")[0] for name in state} == {"parameter", "exp_avg", "exp_avg_sq", "buffer"}
    for kind in KINDS:
        for name in PLANS:
            checkpoint = Checkpoint(latest(folder / kind / name))
            assert equal({key: checkpoint.read(key) for key in checkpoint.names()}, state), (kind, name)
            assert all(len(checkpoint.index.tensors[bias].shards) == 1 for bias in checkpoint.names("buffer/"))


def test_what_one_name_cannot_hold_is_refused(tmp_path):
    """Layers of other shapes, or of one shape and other values; a part of the experts alone."""

    def fn(rank, world_size):
        torch.manual_seed(rank)
        alone = [comm.new_group([r]) for r in range(2)][rank]
        mesh, found = mesh_of([("ep", 2)]), []
        model, _ = build("DDP", mesh)
        for folder, saved, where in (
            (tmp_path, Zero1(nn.Sequential(nn.Linear(2, 2 + rank)), alone), None),
            (tmp_path, Zero1(nn.Linear(2, 2), alone), None),  # drawn by rank: two layers, or copies that drifted
            (tmp_path / str(rank), Zero1(model, mesh.group("dp"), reduce="sum"), mesh.group("dp")),  # this rank alone
        ):
            with pytest.raises(CheckpointError) as caught:
                save(folder, 1, saved, group=where)
            found.append(str(caught.value))
        return found

    for shapes, values, part in launch(fn, 2):
        assert "is float32 (3,) on rank 1 and float32 (2,) on another; give each its own name" in shapes
        assert "tensor parameter/bias has other values on rank 1 than on rank 0; if they are copies" in values
        assert "have 24 elements, and the tensor has 48: some are missing or held twice; save with all ranks" in part
        assert all("or by `names_start_here` of the stages and `shards`" in text for text in (shapes, values, part))
    assert not list(tmp_path.glob("**/step-*"))


class Columns(nn.Module):
    """Columns of a 5 x 7 weight, of which the last ranks have fewer, and a norm that all ranks hold."""

    def __init__(self, size, rank):
        super().__init__()
        self.columns = shard_slice(7, size, rank)
        self.weight = nn.Parameter(torch.arange(35.0).view(5, 7)[:, self.columns].clone())
        self.norm = nn.Parameter(torch.ones(5))

    def place(self, name, tensor):
        return ShardSpec("mine.weight", 1, self.columns.start, 7) if name == "weight" else ShardSpec("mine.norm")


def test_places_that_are_given_hold_for_any_other_shards(tmp_path):
    """tp 2 x dp 2 with ZeRO-1 over dp saves; tp 3 and tp 1 load."""

    def build_columns(tp_size, dp_size):
        mesh = lab.Mesh(lab.Topology([("dp", dp_size), ("tp", tp_size)]))
        model = Columns(tp_size, mesh.rank("tp"))
        return model, Zero1(model, mesh.group("dp"))

    def saving_columns(rank, world_size):
        model, optimizer = build_columns(2, 2)
        return save(tmp_path, 1, optimizer, shard_spec_of=model.place)

    def loading_columns(rank, world_size, path):
        model, optimizer = build_columns(world_size, 1)
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        for shard in optimizer.local_shards:
            shard.optimizer.weight.zero_()
        load(path, optimizer, shard_spec_of=model.place)
        return all(torch.equal(*pair) for pair in zip(model.parameters(), expected, strict=True))

    path = launch(saving_columns, 4)[0]
    assert torch.equal(Checkpoint(path).read("parameter/mine.weight"), torch.arange(35.0).view(5, 7))
    assert all(all(launch(loading_columns, size, path)) for size in (3, 1))


def test_a_table_of_two_stages_is_saved_once(tmp_path):
    """Tied weights on first and last stage, which ZeRO-1 shards in different places, come from one rank and to both."""
    config = LlamaConfig(vocabulary_size=11, hidden_size=8, ffn_size=12, num_layers=2, num_heads=2, tied=True)

    def build_llama(axes, seed):
        mesh = lab.Mesh(lab.Topology(axes))
        program = schedules.build("1f1b", 2, 2) if mesh.size("pp") > 1 else None
        model = build_stages(config, mesh, program, seed=seed, dtype=torch.float64)
        return model, Zero1(model, mesh, bucket_bytes=300, program=program)

    def fn(rank, world_size, axes, path):
        model, optimizer = build_llama(axes, 1 if path else 0)
        if path is None:
            return save(tmp_path, 1, optimizer), model.full_state_dict()
        load(path, optimizer)
        return model.full_state_dict()

    path, expected = launch(fn, 4, [("pp", 2), ("dp", 2)], None)[0]
    checkpoint = Checkpoint(path)
    assert "parameter/head.weight" not in checkpoint.index.tensors
    assert torch.equal(checkpoint.read("parameter/embedding.weight"), expected["embedding.weight"])
    for axes, size in (([("pp", 2)], 2), ([("dp", 1)], 1)):
        assert all(equal(found, expected) for found in launch(fn, size, axes, path))
