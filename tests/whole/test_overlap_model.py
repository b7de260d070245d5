"""A V3 model on DualPipe with overlapped experts: embedding, head, shared experts, balance loss, tp and cp."""

from dataclasses import replace
from math import prod

import pytest
import torch
from overlap_models import CONFIG, LENGTH, added, build, one_process, run, worst

import dualpipe_lab as lab
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.ep.overlap import interruptible_stage

LIMIT = 1e-12


def several(rank, world_size, cases, references):
    torch.manual_seed(rank)  # weights made here would be found out
    return [run(references[key_of(case)], *case[:-1], **case[-1]) for case in cases]


def key_of(case):
    """What the reference of a case depends on: the model, the number of microbatches, and that of data ranks."""
    config, axes, _, number, *_ = case
    return config, number, prod(size for axis, size in axes if axis in ("dp", "ep"))


def check(world_size, cases, timeout=180):
    references = {key: one_process(*key) for key in set(map(key_of, cases))}
    out = lab.launch(several, world_size, cases, references, timeout=timeout)
    for place, case in enumerate(cases):
        results = [found[place] for found in out]
        error, name = worst(results)
        print(f"{case[2]} {case[1]} {case[4]} {case[-1]}: {error:.1e} in {name}")
        assert error <= LIMIT, (case, name, error)
        _, _, loads = references[key_of(case)]
        counted = added(results)
        assert loads.keys() == counted.keys()
        assert all(torch.equal(counted[layer], load) for layer, load in loads.items()), case


@pytest.mark.slow
def test_dualpipe_with_experts_has_the_gradients_of_one_process():
    axes = [("pp", 2), ("ep", 2)]
    bare = replace(CONFIG, num_shared_experts=0, balance=0.0)
    check(
        4,
        [
            (CONFIG, axes, "dualpipe", 4, [2, 3], {}),
            (CONFIG, axes, "dualpipe", 4, [4, 1], {"hook": "serial"}),
            (CONFIG, axes, "dualpipe", 4, [3, 2], {"plain": (0,)}),
            (CONFIG, axes, "dualpipe", 4, [3, 2], {"plain": (1,), "fill": False}),
            (bare, axes, "dualpipe", 4, [1, 4], {}),
            (CONFIG, axes, "dualpipev", 4, [2, 1, 1, 1], {}),
            (CONFIG, axes, "zero_bubble_h1", 3, [2, 3], {"again": True}),
        ],
    )


@pytest.mark.slow
def test_pipelines_of_four_and_layers_shared_along_tp_and_cp():
    check(
        8,
        [
            (CONFIG, [("pp", 4), ("ep", 2)], "dualpipe", 8, [2, 1, 1, 1], {}),
            (CONFIG, [("pp", 2), ("ep", 2), ("tp", 2)], "dualpipe", 4, [2, 3], {}),
            (CONFIG, [("pp", 2), ("ep", 2), ("cp", 2)], "dualpipe", 4, [2, 3], {}),
            (CONFIG, [("pp", 2), ("ep", 2), ("tp", 2)], "dualpipev", 4, [2, 1, 1, 1], {"again": True}),
            (CONFIG, [("pp", 2), ("ep", 2), ("cp", 2)], "dualpipev", 4, [1, 1, 2, 1], {"plain": (2,)}),
            (CONFIG, [("pp", 2), ("ep", 2), ("tp", 2)], "dualpipe", 4, [2, 3], {"sequence_parallel": True}),
            (CONFIG, [("pp", 2), ("cp", 2), ("tp", 2)], "dualpipev", 4, [2, 1, 1, 1], {"sequence_parallel": True}),
        ],
    )


@pytest.mark.slow
def test_data_parallelism_sees_the_gradients_of_every_piece():
    axes = [("pp", 2), ("dp", 2), ("ep", 2)]
    check(
        8,
        [(CONFIG, axes, "dualpipe", 4, [2, 3], {"zero": name}) for name in ("Ddp", "Zero1", "Zero2")]
        + [(CONFIG, axes, "dualpipev", 4, [2, 1, 1, 1], {"zero": "Zero2"})],
    )


def test_experts_that_are_dispatched_node_by_node_are_refused():
    def fn(rank, world_size):
        module = build(CONFIG, lab.Mesh(lab.Topology([("ep", 1)])), None).stages[0]
        module.layers.get_submodule("2").mlp.nodes = "two nodes"
        with pytest.raises(ValueError, match="layer 2 dispatches node by node, which cannot be inter"):
            interruptible_stage(module, 0)

    lab.launch(fn, 1)


def test_zero_3_is_refused():
    def fn(rank, world_size):
        module = build(CONFIG, lab.Mesh(lab.Topology([("ep", 1)])), None).stages[0]
        stage, ids = interruptible_stage(module, 0), torch.zeros(1, LENGTH, dtype=torch.int64)
        stage.forward(0, (ids,))
        stage.passes.clear()
        optimizer = Zero3(module, list(module.layers))
        with pytest.raises(ValueError, match="use Ddp, Zero1 or Zero2 for overlapped experts, or a plain stage"):
            stage.forward(0, (ids,))
        with pytest.raises(ValueError, match="ZeRO-3 gathers weights when a module is called"):
            interruptible_stage(module, 0)
        assert optimizer.num_steps == 0

    lab.launch(fn, 1)
