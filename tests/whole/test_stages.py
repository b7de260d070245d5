"""Stages of whole models: loss and gradients of one process on every schedule, axis and cut; equal starts; rules."""

from math import prod

import pytest
import torch
from stage_runs import assert_exact, build, launch, plain, step, worst

import dualpipe_lab as lab
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules

SIZES = {"vocabulary_size": 19, "hidden_size": 8, "ffn_size": 10, "num_heads": 2, "num_kv_heads": 1}
LLAMA = LlamaConfig(**SIZES, num_layers=5)
TIED = LlamaConfig(**SIZES, num_layers=5, tied=True, qk_norm=True)
V3 = V3MoEConfig(
    vocabulary_size=19, hidden_size=8, num_layers=5, num_heads=2, num_kv_heads=1, ffn_size=10, expert_ffn_size=6,
    balance=0.3,
)  # fmt: skip
SYNCHRONOUS = schedules.names(synchronous=True)


def runs(config, axes, names=("1f1b",), num_microbatches=4, edp=None, over=("dp",), **options):
    """In a rank: the worst error of each schedule."""
    torch.manual_seed(lab.comm.get_rank())  # weights or shards that are not drawn by name would differ
    mesh = lab.Mesh(lab.Topology(axes, edp=edp, experts_over=over))
    num_data = prod(size for axis, size in axes if axis in ("dp", "ep"))
    expected, found = plain(config, num_microbatches, num_data), {}
    for name in names:
        model = build(config, mesh, schedules.build(name, mesh.size("pp"), num_microbatches), **options)
        found[name] = worst(step(model), expected)
    return found


@pytest.mark.parametrize("config", [LLAMA, V3], ids=["llama", "v3"])
def test_every_schedule_has_the_gradients_of_one_process(config):
    def fn(rank, world_size):
        return runs(config, [("pp", 2)], SYNCHRONOUS)

    assert_exact(launch(fn, 2))


# Of 4 ranks; the numbers of data ranks are dp x ep.
CUTS = {
    "llama": {
        "tp": (LLAMA, [("pp", 2), ("tp", 2)], {}),
        "sequence parallel": (LLAMA, [("pp", 2), ("tp", 2)], {"sequence_parallel": True}),
        "recomputed": (LLAMA, [("pp", 2), ("tp", 2)], {"sequence_parallel": True, "recompute": True}),
        "tied": (TIED, [("pp", 2), ("tp", 2)], {"sequence_parallel": True}),
        "zigzag": (LLAMA, [("pp", 2), ("cp", 2)], {"layout": "zigzag"}),
        "striped": (TIED, [("cp", 2), ("pp", 2)], {"layout": "striped", "recompute": True}),
        "contiguous": (LLAMA, [("pp", 2), ("cp", 2)], {"layout": "contiguous", "layers": (0, 5)}),
        "dp": (TIED, [("pp", 2), ("dp", 2)], {"layers": (5, 0)}),
    },
    "v3": {
        "tp": (V3, [("pp", 2), ("tp", 2)], {}),
        "sequence parallel": (V3, [("pp", 2), ("tp", 2)], {"sequence_parallel": True}),
        "recomputed": (V3, [("pp", 2), ("ep", 2)], {"recompute": True}),
        "zigzag": (V3, [("pp", 2), ("cp", 2)], {"layout": "zigzag"}),
        "striped": (V3, [("pp", 2), ("cp", 2)], {"layout": "striped", "recompute": True}),
        "ep": (V3, [("pp", 2), ("ep", 2)], {}),
        "ep in dp": (V3, [("pp", 2), ("dp", 2)], {"edp": 1}),
        "edp": (V3, [("pp", 2), ("dp", 2)], {"edp": 2}),
        "experts over cp": (V3, [("pp", 2), ("cp", 2)], {"edp": 1, "over": ("cp",), "layout": "contiguous"}),
    },
}
KINDS = ("1f1b", "zero_bubble_h1", "interleaved", "dualpipe", "dualpipev")  # whole, split, looped, mirrored, folded


@pytest.mark.parametrize("model", CUTS)
def test_every_axis_has_the_gradients_of_one_process(model):
    def fn(rank, world_size):
        found = {}
        for name, (config, axes, options) in CUTS[model].items():
            kinds = [kind for kind in KINDS if "layers" not in options or kind in ("1f1b", "dualpipe")]
            found |= {(name, kind): error for kind, error in runs(config, axes, kinds, **options).items()}
        return found

    assert_exact(launch(fn, 4))
