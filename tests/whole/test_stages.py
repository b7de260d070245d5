"""Stages of whole models: loss and gradients of one process on every schedule, axis and cut; equal starts; rules."""

import itertools
from dataclasses import replace
from math import prod

import pytest
import torch
from stage_runs import (
    assert_exact,
    bias_of,
    build,
    launch,
    plain,
    plain_loads,
    plain_model,
    routers,
    step,
    worst,
)

import dualpipe_lab as lab
from dualpipe_lab.dp.param_specs import param_specs
from dualpipe_lab.ep.deepseek_moe import bias_step
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp import schedules
from dualpipe_lab.tp.shard import shards_of

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
def test_every_schedule_has_the_gradients_of_one_process(config, some):
    names = some(SYNCHRONOUS, 5)

    def fn(rank, world_size):
        return runs(config, [("pp", 2)], names)

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
        "one stage": (TIED, [("dp", 2), ("tp", 2)], {"layers": (5,)}),
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
KINDS = ("dualpipe", "zero_bubble_h1", "interleaved", "1f1b", "dualpipev")  # mirrored, split, looped, whole, folded


def run_cuts(cuts, kinds=KINDS):
    found = {}
    for name, (config, axes, options) in cuts.items():
        these = kinds if "layers" not in options else ["1f1b", "dualpipe"] if len(options["layers"]) > 1 else ["1f1b"]
        found |= {(name, kind): error for kind, error in runs(config, axes, these, **options).items()}
    return found


@pytest.mark.parametrize("model", CUTS)
def test_every_axis_has_the_gradients_of_one_process(model, some, amount):
    cuts, kinds = some(CUTS[model], 3), KINDS[: amount(5, 3)]

    def fn(rank, world_size):
        return run_cuts(cuts, kinds)

    assert_exact(launch(fn, 4))


def test_three_axes_under_dualpipe_have_the_gradients_of_one_process(some, amount):
    many = {"sequence_parallel": True, "recompute": True}
    cuts = {
        "ep, tp": (V3, [("pp", 2), ("ep", 2), ("tp", 2)], {}),
        "ep in dp, tp": (V3, [("dp", 2), ("pp", 2), ("tp", 2)], {"edp": 1, **many}),
        "cp, ep": (V3, [("pp", 2), ("cp", 2), ("ep", 2)], {"layout": "zigzag"}),
        "cp, tp": (TIED, [("pp", 2), ("cp", 2), ("tp", 2)], {"layout": "striped", **many}),
    }

    cuts, kinds = some(cuts, 2), ["dualpipe", "dualpipev"][: amount(2, 1)]

    def fn(rank, world_size):
        return run_cuts(cuts, kinds)

    assert_exact(launch(fn, 8))


def test_pairs_on_four_ranks_have_the_gradients_of_one_process(amount):
    paired = ["dualpipe", *schedules.names(synchronous=True, pairs=True)[-3:], "easy_dualpipe", "dualpipev"]
    paired = paired[: amount(6, 3)]

    def fn(rank, world_size):
        found = {}
        for config in (replace(TIED, num_layers=9), replace(V3, num_layers=8)):
            errors = runs(config, [("pp", 4)], paired, num_microbatches=8)
            found |= {(type(config), name): error for name, error in errors.items()}
        return found

    assert_exact(launch(fn, 4))


def test_every_cut_starts_from_the_numbers_of_the_full_model():
    """Also both copies of a stage, and both of a tied table, in every type."""
    cuts = [(TIED, [("pp", 2), ("tp", 2)], "dualpipe"), (V3, [("pp", 2), ("ep", 2)], "dualpipe")]
    cuts += [(TIED, [("tp", 2), ("pp", 2)], "dualpipev"), (V3, [("ep", 4)], None)]

    def fn(rank, world_size):
        torch.manual_seed(rank)
        checked = set()
        for config, axes, name in cuts:
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                mesh, full = lab.Mesh(lab.Topology(axes)), dict(plain_model(config, dtype).named_parameters())
                model = build(config, mesh, name and schedules.build(name, 2, 4), dtype=dtype)
                for stage in model.stages.values():
                    shards = shards_of(stage)
                    for local, parameter in stage.named_parameters():
                        whole = full[stage.tied_names.get(local, local)]
                        assert torch.equal(parameter, shards[local].of(whole) if local in shards else whole), local
                        checked.add(local)
                assert {declared.name for declared in param_specs(model, model.program).values()} - {
                    "head.weight"
                } <= set(full)
                gathered = model.full_state_dict()
                assert gathered.keys() == full.keys()
                assert all(torch.equal(gathered[name], value) for name, value in full.items())
        return checked

    assert {"embedding.weight", "layers.4.mlp.experts.gate", "layers.4.mlp.down.weight"} <= set.union(*launch(fn, 4))


def test_biases_move_by_the_loads_of_all_ranks_and_both_copies():
    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("pp", 2), ("ep", 2)]))
        model = build(V3, mesh, schedules.dualpipe(2, 4))
        step(model)
        loads, moved = model.update_biases(0.01), [routers(stage) for _, stage in sorted(model.stages.items())]
        return [(n, load, router.bias) for load, (n, router) in zip(loads, itertools.chain(*moved), strict=True)]

    expected = plain_loads(V3, 4, 2)
    for found in launch(fn, 4):
        assert [number for number, *_ in found] == [1, 2, 3, 4]
        for number, load, bias in found:
            assert torch.equal(load, expected[number])
            assert torch.equal(bias, bias_of(number, 8) + bias_step(load, 0.01))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_shorter_types_train_too(dtype, limit):
    """The loss is near that of float64; shapes between stages are exchanged, not given."""

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("pp", 2), ("tp", 2)]))
        found = {}
        for config in (TIED, V3):
            model = build(config, mesh, schedules.build("dualpipev", 2, 4), dtype=dtype, sequence_parallel=True)
            result, expected = step(model, explicit=False), plain(config, 4)
            assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}
            model.update_biases(0.001)  # refused for biases of 16 bits
            found[type(config)] = float(abs(result["loss"] / expected["loss"] - 1))
        return found

    for found in launch(fn, 4):
        assert max(found.values()) <= limit
