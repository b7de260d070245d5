"""The V3-style model with latent attention: loss and gradients of one process on every axis and schedule."""

from dataclasses import replace
from math import prod

import torch
from stage_runs import assert_exact, build, launch, plain, step, worst

import dualpipe_lab as lab
from dualpipe_lab import data, train
from dualpipe_lab.models import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.tp import LatentSizes

SIZES = LatentSizes(query_rank=6, kv_rank=5, content=4, position=2, value=3)
V3 = V3MoEConfig(
    vocabulary_size=19, hidden_size=8, num_layers=3, num_heads=2, ffn_size=10, expert_ffn_size=6, balance=0.3,
    latent=SIZES,
)  # fmt: skip
DIRECT = replace(V3, latent=replace(SIZES, query_rank=None, kv_rank=30))  # a latent longer than keys and values

CUTS = {
    "latents on the ring": (V3, [("cp", 2), ("tp", 2)], "1f1b", {"layout": "zigzag", "sequence_parallel": True}),
    "dualpipe": (V3, [("pp", 2), ("tp", 2)], "dualpipe", {"sequence_parallel": True, "recompute": True}),
    "keys on the ring": (DIRECT, [("cp", 2), ("tp", 2)], "1f1b", {"layout": "striped"}),
    "sequence parallel": (DIRECT, [("ep", 2), ("tp", 2)], "1f1b", {"sequence_parallel": True, "recompute": True}),
    "split": (V3, [("pp", 2), ("ep", 2)], "zero_bubble_h1", {}),
    "edp": (V3, [("dp", 4)], "1f1b", {"edp": 2}),
    "ep x tp": (V3, [("ep", 2), ("tp", 2)], "1f1b", {}),
}


def test_every_axis_has_the_gradients_of_one_process(amount):
    cuts = list(CUTS.items())[: amount(7, 4)]

    def fn(rank, world_size):
        found = {}
        for name, (config, axes, schedule, options) in cuts:
            mesh = lab.Mesh(lab.Topology(axes, edp=options.pop("edp", None)))
            program = schedules.build(schedule, mesh.size("pp"), 4)
            data = prod(size for axis, size in axes if axis in ("dp", "ep"))
            torch.manual_seed(rank)
            found[name] = worst(step(build(config, mesh, program, **options)), plain(config, 4, data))
        return found

    assert_exact(launch(fn, 4))


def test_a_checkpoint_of_a_training_is_read_with_its_latents(tmp_path):
    config, plan = replace(V3, vocabulary_size=256), lab.Plan(tp=2, precision="float64")
    options = {"sequence_length": 8, "global_batch": 2, "folder": tmp_path, "save_every": 1, "log_every": 0}
    result = train.run(config, plan, data.frozen_corpus(), steps=1, **options)
    model = train.read_model(tmp_path)
    weights = result.weights()
    assert model.config == config
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
