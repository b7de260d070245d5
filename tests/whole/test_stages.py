"""Stages of whole models: loss and gradients of one process on every schedule, axis and cut; equal starts; rules."""

import torch
from stage_runs import assert_exact, build, launch, plain, step, worst

import dualpipe_lab as lab
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.pp import schedules

SIZES = {"vocabulary_size": 19, "hidden_size": 8, "ffn_size": 10, "num_heads": 2, "num_kv_heads": 1}
LLAMA = LlamaConfig(**SIZES, num_layers=5)
TIED = LlamaConfig(**SIZES, num_layers=5, tied=True, qk_norm=True)
SYNCHRONOUS = schedules.names(synchronous=True)


def runs(config, axes, names, num_microbatches=4, num_data=1, edp=None, **options):
    """In a rank: the worst error of each schedule."""
    mesh = lab.Mesh(lab.Topology(axes, edp=edp))
    expected, found = plain(config, num_microbatches, num_data), {}
    for name in names:
        model = build(config, mesh, schedules.build(name, mesh.size("pp"), num_microbatches), **options)
        found[name] = worst(step(model), expected)
    return found


def test_every_schedule_has_the_gradients_of_one_process():
    def fn(rank, world_size):
        torch.manual_seed(rank)
        return runs(LLAMA, [("pp", 2)], SYNCHRONOUS)

    assert_exact(launch(fn, 2))
