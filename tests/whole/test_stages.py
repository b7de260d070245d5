"""Stages of whole models: loss and gradients of one process on every schedule, axis and cut; equal starts; rules."""

import itertools
from dataclasses import replace

import pytest
import torch
from stage_runs import (
    LATENT,
    LLAMA,
    TIED,
    V3,
    bias_of,
    build,
    check_cuts,
    launch,
    plain,
    plain_model,
    routers,
    step,
)

import dualpipe_lab as lab
from dualpipe_lab.dp.param_specs import param_specs
from dualpipe_lab.ep.deepseek_moe import bias_step
from dualpipe_lab.pp import schedules
from dualpipe_lab.tp.shard import shards_of

# a latent longer than keys and values
DIRECT = replace(LATENT, latent=replace(LATENT.latent, query_rank=None, kv_rank=30))
SHARDED, AGAIN = {"sequence_parallel": True}, {"recompute": True}


@pytest.mark.parametrize("config", [LLAMA, V3], ids=["llama", "v3"])
def test_every_schedule_has_the_gradients_of_one_process(config, some):
    check_cuts({"pp": (config, [("pp", 2)], some(schedules.names(synchronous=True), 5), {})})


KINDS = ("dualpipe", "zero_bubble_h1", "interleaved", "1f1b", "dualpipev")  # mirrored, split, looped, whole, folded
CUTS = {  # of 4 ranks; the numbers of data ranks are dp x ep
    "llama": {
        "tp": (LLAMA, [("pp", 2), ("tp", 2)], KINDS, {}),
        "sequence parallel": (LLAMA, [("pp", 2), ("tp", 2)], KINDS, SHARDED),
        "recomputed": (LLAMA, [("pp", 2), ("tp", 2)], KINDS, SHARDED | AGAIN),
        "tied": (TIED, [("pp", 2), ("tp", 2)], KINDS, SHARDED),
        "zigzag": (LLAMA, [("pp", 2), ("cp", 2)], KINDS, {"layout": "zigzag"}),
        "striped": (TIED, [("cp", 2), ("pp", 2)], KINDS, {"layout": "striped", **AGAIN}),
        "contiguous": (LLAMA, [("pp", 2), ("cp", 2)], KINDS[::3], {"layout": "contiguous", "layers": (0, 5)}),
        "dp": (TIED, [("pp", 2), ("dp", 2)], KINDS[::3], {"layers": (5, 0)}),
        "one stage": (TIED, [("dp", 2), ("tp", 2)], ("1f1b",), {"layers": (5,)}),
    },
    "v3": {
        "tp": (V3, [("pp", 2), ("tp", 2)], KINDS, {}),
        "sequence parallel": (V3, [("pp", 2), ("tp", 2)], KINDS, SHARDED),
        "recomputed": (V3, [("pp", 2), ("ep", 2)], KINDS, AGAIN),
        "zigzag": (V3, [("pp", 2), ("cp", 2)], KINDS, {"layout": "zigzag"}),
        "striped": (V3, [("pp", 2), ("cp", 2)], KINDS, {"layout": "striped", **AGAIN}),
        "ep": (V3, [("pp", 2), ("ep", 2)], KINDS, {}),
        "ep in dp": (V3, [("pp", 2), ("dp", 2)], KINDS, {"edp": 1}),
        "edp": (V3, [("pp", 2), ("dp", 2)], KINDS, {"edp": 2}),
        "experts over cp": (V3, [("pp", 2), ("cp", 2)], KINDS, {"edp": 1, "over": ("cp",), "layout": "contiguous"}),
    },
}
LATENT_CUTS = {
    "latents on the ring": (LATENT, [("cp", 2), ("tp", 2)], ("1f1b",), {"layout": "zigzag", **SHARDED}),
    "dualpipe": (LATENT, [("pp", 2), ("tp", 2)], ("dualpipe",), SHARDED | AGAIN),
    "keys on the ring": (DIRECT, [("cp", 2), ("tp", 2)], ("1f1b",), {"layout": "striped"}),
    "sequence parallel": (DIRECT, [("ep", 2), ("tp", 2)], ("1f1b",), SHARDED | AGAIN),
    "split": (LATENT, [("pp", 2), ("ep", 2)], ("zero_bubble_h1",), {}),
    "edp": (LATENT, [("dp", 4)], ("1f1b",), {"edp": 2}),
}


@pytest.mark.parametrize("model", CUTS)
def test_every_axis_has_the_gradients_of_one_process(model, some, amount):
    cuts = some(CUTS[model], 3)
    check_cuts({cut: (*row, names[: amount(5, 3)], options) for cut, (*row, names, options) in cuts.items()})


def test_latent_attention_has_the_gradients_of_one_process_on_every_axis(some):
    check_cuts(some(LATENT_CUTS, 4))


def test_three_axes_under_dualpipe_have_the_gradients_of_one_process(some, amount):
    kinds = ("dualpipe", "dualpipev")[: amount(2, 1)]
    cuts = {
        "ep, tp": (V3, [("pp", 2), ("ep", 2), ("tp", 2)], kinds, {}),
        "ep in dp, tp": (V3, [("dp", 2), ("pp", 2), ("tp", 2)], kinds, {"edp": 1, **SHARDED, **AGAIN}),
        "cp, ep": (V3, [("pp", 2), ("cp", 2), ("ep", 2)], kinds, {"layout": "zigzag"}),
        "cp, tp": (TIED, [("pp", 2), ("cp", 2), ("tp", 2)], kinds, {"layout": "striped", **SHARDED, **AGAIN}),
    }
    check_cuts(some(cuts, 2))


def test_pairs_on_four_ranks_have_the_gradients_of_one_process(amount):
    paired = ("dualpipe", *schedules.names(synchronous=True, pairs=True)[-3:], "easy_dualpipe", "dualpipev")
    configs = {"llama": replace(TIED, num_layers=9), "v3": replace(V3, num_layers=8)}
    names = paired[: amount(6, 3)]
    check_cuts({name: (config, [("pp", 4)], names, {"num_microbatches": 8}) for name, config in configs.items()})


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

    expected = plain(V3, 4, 2)
    for found in launch(fn, 4):
        assert [number for number, *_ in found] == [1, 2, 3, 4]
        for number, load, bias in found:
            assert torch.equal(load, expected[f"load {number}"])
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
