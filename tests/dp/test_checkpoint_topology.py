"""A model that is cut over tp and pp loads under another topology."""

import pytest
import torch
from models import launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.checkpoint import Checkpoint, ShardSpec, latest, load, save
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.sharding import shard_slice


class Slice(nn.Module):
    """A rank's part of a 7 x 5 weight: rows under tp, or columns; a norm that all tp ranks hold; layers under pp."""

    def __init__(self, tp, tp_size, layers):
        super().__init__()
        whole = torch.arange(35, dtype=torch.float64).view(7, 5)
        self.tp, self.tp_size, self.numbers = tp, tp_size, list(layers)
        self.rows = nn.ParameterList((whole[shard_slice(7, tp_size, tp)] + 100 * layer).clone() for layer in layers)
        self.columns = nn.ParameterList(
            (whole[:, shard_slice(5, tp_size, tp)] - 100 * layer).clone() for layer in layers
        )
        self.norm = nn.ParameterList(torch.full((5,), float(layer), dtype=torch.float64) for layer in layers)

    def shard_spec_of(self, name, tensor):
        kind, number = name.split(".")
        name = f"layers.{self.numbers[int(number)]}.{kind}"
        if kind == "norm":
            return ShardSpec(name)
        axis, size = (0, 7) if kind == "rows" else (1, 5)
        return ShardSpec(name, axis, shard_slice(size, self.tp_size, self.tp).start, size)


def build_part(mesh, offset):
    layers = range(4)[shard_slice(4, mesh.size("pp"), mesh.rank("pp"))]
    model = Slice(mesh.rank("tp"), mesh.size("tp"), layers)
    for parameter in model.parameters():
        parameter.data += offset
    return model, Zero1(model, mesh.group("dp"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved by tp 2, pp 2, dp 2 with ZeRO-1 over dp."""
    folder = tmp_path_factory.mktemp("saved")

    def saving(rank, world_size):
        model, optimizer = build_part(lab.Mesh(lab.Topology([("pp", 2), ("dp", 2), ("tp", 2)])), 0)
        save(folder, 1, optimizer, shard_spec_of=model.shard_spec_of)

    launch(saving, 8)
    return latest(folder)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 4, 1), (1, 1, 1), (3, 2, 1), (2, 1, 2), (4, 1, 1)])
def test_a_model_under_tp_and_pp_loads_under_another_topology(saved, tp, pp, dp):
    def loading(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("pp", pp), ("dp", dp), ("tp", tp)]))
        model, optimizer = build_part(mesh, 1000)
        load(saved, optimizer, shard_spec_of=model.shard_spec_of)
        expected = build_part(mesh, 0)[0]
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))

    assert launch(loading, tp * pp * dp) == [True] * (tp * pp * dp)
    rows = Checkpoint(saved).read("parameter/layers.3.columns")
    assert torch.equal(rows, torch.arange(35, dtype=torch.float64).view(7, 5) - 300)
