"""A V3 model on DualPipe with overlapped experts: embedding, head, shared experts, balance loss, tp and cp."""

from dataclasses import replace
from math import prod

import pytest
import torch
from overlap_models import CONFIG, LENGTH, ROWS, added, batch, build, one_process, run, worst

import dualpipe_lab as lab
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.ep.overlap import overlappable_stage, overlapped_forward_backward
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import Overlap
from dualpipe_lab.tp import LatentSizes

LIMIT = 1e-12


def several(rank, world_size, cases, references):
    torch.manual_seed(rank)  # weights made here would be found out
    return [run(references[key_of(case)], *case[:-1], **case[-1]) for case in cases]


def key_of(case):
    """What the reference of a case depends on: the model, the number of microbatches, and that of data ranks."""
    config, axes, _, number, *_ = case
    return config, number, prod(size for axis, size in axes if axis in ("dp", "ep")), case[-1].get("second")


@pytest.fixture
def first(amount):
    """The first cases of a list, which differ most; all with --every."""
    return lambda number, cases: cases[: amount(len(cases), number)]


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


def test_dualpipe_with_experts_has_the_gradients_of_one_process(first):
    axes = [("pp", 2), ("ep", 2)]
    bare = replace(CONFIG, num_shared_experts=0, balance=0.0)
    cases = [
        (CONFIG, axes, "dualpipe", 4, [3, 2], {"plain": (0,)}),
        (CONFIG, axes, "zero_bubble_h1", 3, [2, 3], {"again": True}),
        (bare, axes, "dualpipe", 4, [1, 4], {}),
        (CONFIG, axes, "dualpipe", 4, [4, 1], {"hook": "serial"}),
        (CONFIG, axes, "dualpipev", 4, [2, 1, 1, 1], {}),
        (CONFIG, axes, "dualpipe", 4, [3, 2], {"plain": (1,)}),
        (CONFIG, axes, "dualpipe", 4, [2, 3], {}),
    ]
    check(4, first(4, cases))


def test_latent_attention_under_overlapped_experts():
    latent = replace(CONFIG, latent=LatentSizes(query_rank=6, kv_rank=5, content=4, position=2, value=3))
    check(
        4,
        [
            (latent, [("pp", 2), ("tp", 2)], "dualpipe", 4, [2, 3], {"sequence_parallel": True}),
            (latent, [("pp", 2), ("cp", 2)], "dualpipev", 4, [2, 1, 1, 1], {"again": True}),
        ],
    )


def test_pipelines_of_four_and_layers_shared_along_tp_and_cp(first):
    cases = [
        (CONFIG, [("pp", 2), ("ep", 2), ("tp", 2)], "dualpipe", 4, [2, 3], {"sequence_parallel": True}),
        (CONFIG, [("pp", 2), ("ep", 2), ("cp", 2)], "dualpipev", 4, [1, 1, 2, 1], {"plain": (2,)}),
        (CONFIG, [("pp", 2), ("ep", 2), ("tp", 2)], "dualpipev", 4, [2, 1, 1, 1], {"again": True}),
        (CONFIG, [("pp", 4), ("ep", 2)], "dualpipe", 8, [2, 1, 1, 1], {}),
        (CONFIG, [("pp", 2), ("cp", 2), ("tp", 2)], "dualpipev", 4, [2, 1, 1, 1], {"sequence_parallel": True}),
        (CONFIG, [("pp", 2), ("ep", 2), ("tp", 2)], "dualpipe", 4, [2, 3], {}),
        (CONFIG, [("pp", 2), ("ep", 2), ("cp", 2)], "dualpipe", 4, [2, 3], {}),
    ]
    check(8, first(2, cases))


def test_every_layout_with_a_balance_loss_and_unequal_numbers_of_targets(first):
    """A microbatch of one data rank has no target; the balance loss of its sequences counts all the same."""
    pipeline, ring = [("pp", 2), ("cp", 2)], [("cp", 2), ("ep", 2)]
    cases = [
        (CONFIG, pipeline, "dualpipe", 4, [2, 3], {"layout": "striped", "zero": "Zero2", "again": True}),
        (CONFIG, pipeline, "dualpipe", 4, [2, 3], {"layout": "contiguous", "zero": "Zero3"}),
        (CONFIG, ring, "1f1b", 3, [5], {"plain": (0,), "layout": "zigzag"}),
        (CONFIG, pipeline, "dualpipe", 4, [2, 3], {"layout": "striped", "zero": "DDP", "hook": "serial"}),
        (CONFIG, ring, "1f1b", 3, [5], {"plain": (0,), "layout": "contiguous"}),
        (CONFIG, ring, "1f1b", 3, [5], {"plain": (0,), "layout": "striped"}),
    ]
    check(4, first(3, cases))


def test_data_parallelism_sees_the_gradients_of_every_piece(first):
    axes = [("pp", 2), ("dp", 2), ("ep", 2)]
    cases = [(CONFIG, axes, "dualpipev", 4, [2, 1, 1, 1], {"zero": "Zero3"})]
    cases += [(CONFIG, axes, "dualpipe", 4, [2, 3], {"zero": name}) for name in ("Zero2", "DDP", "Zero1", "Zero3")]
    cases += [(CONFIG, axes, "dualpipev", 4, [2, 1, 1, 1], {"zero": "Zero2"})]
    check(8, first(2, cases))


def test_a_loss_in_chunks_gives_the_head_its_gradient(first):
    experts, options = [("pp", 2), ("ep", 2)], {"chunk": 5}
    cases = [
        (CONFIG, [("pp", 2), ("tp", 2)], "dualpipe", 4, [2, 3], {"sequence_parallel": True, **options}),
        (CONFIG, [("cp", 2), ("ep", 2)], "paired_1f1b", 3, [5], options),
        (CONFIG, experts, "paired_zero_bubble_h1", 4, [3, 2], options),
        (replace(CONFIG, balance=0.0), experts, "dualpipev", 4, [2, 1, 1, 1], {"again": True, **options}),
        (CONFIG, experts, "dualpipe", 4, [2, 3], options),
    ]
    check(4, first(3, cases))


@pytest.mark.parametrize("options", [{"second": 0.3}, {"second": 0.3, "chunk": 5}], ids=str)
def test_a_second_token_under_overlapped_experts(options, first):
    """Its layer has pieces of its own; head and table are used twice, and once per microbatch by autograd."""
    experts = [("pp", 2), ("ep", 2)]
    cases = [
        (CONFIG, [("pp", 2), ("cp", 2)], "dualpipe", 4, [2, 3], {"layout": "striped", "again": True, **options}),
        (CONFIG, experts, "paired_1f1b", 4, [5, 0], options),
        (CONFIG, experts, "dualpipe", 4, [3, 2], {"plain": (0,), **options}),
        (CONFIG, [("pp", 2), ("tp", 2)], "dualpipev", 4, [2, 1, 1, 1], {"sequence_parallel": True, **options}),
        (CONFIG, experts, "zero_bubble_h1", 3, [2, 3], {"again": True, **options}),
        (CONFIG, experts, "paired_zero_bubble_h1", 4, [3, 2], options),
        (replace(CONFIG, num_shared_experts=0, balance=0.0), experts, "dualpipe", 4, [1, 4], options),
        (CONFIG, experts, "dualpipe", 4, [2, 3], {"hook": "serial", **options}),
        (CONFIG, [("cp", 2), ("ep", 2)], "paired_1f1b", 3, [5], options),
        (CONFIG, [("pp", 2), ("tp", 2)], "dualpipe", 4, [2, 3], options),
        (CONFIG, experts, "dualpipev", 4, [2, 1, 1, 1], {"again": True, **options}),
        (CONFIG, experts, "dualpipe", 4, [2, 3], options),
    ]
    check(4, first(4, cases))


def test_data_parallelism_sees_losses_with_weights(first):
    both, axes = {"second": 0.3, "chunk": 5}, [("pp", 2), ("dp", 2)]
    cases = [
        (CONFIG, axes, "dualpipe", 4, [2, 3], {"zero": "Zero3", **both}),
        (CONFIG, [("dp", 4)], "paired_1f1b", 3, [5], {"zero": "Zero2", **both}),
        (CONFIG, axes, "dualpipev", 4, [2, 1, 1, 1], {"zero": "Zero2", **both}),
        (CONFIG, axes, "dualpipe", 4, [2, 3], {"zero": "DDP", **both}),
        (CONFIG, [("dp", 4)], "paired_1f1b", 3, [5], {"zero": "Zero3", **both}),
        (CONFIG, axes, "dualpipev", 4, [2, 1, 1, 1], {"zero": "Zero3", **both}),
        (CONFIG, axes, "dualpipe", 4, [2, 3], {"zero": "Zero1", **both}),
    ]
    check(4, first(3, cases))


def test_experts_that_are_dispatched_node_by_node_are_refused():
    def fn(rank, world_size):
        module = build(CONFIG, lab.Mesh(lab.Topology([("ep", 1)])), None).stages[0]
        module.layers.get_submodule("2").mlp.nodes = "two nodes"
        with pytest.raises(ValueError, match="layer 2 dispatches node by node, which cannot be inter"):
            overlappable_stage(module, 0)

    lab.launch(fn, 1)


def test_zero_3_gathers_a_stage_once_per_action_or_pair():
    """On one stage, where the halves of every pair share weights: calls, memory, and the gradients of DDP."""
    program = schedules.build("paired_1f1b", 1, 4)
    num_pairs = sum(isinstance(step, Overlap) for step in program.ranks[0])

    def fn(rank, world_size):
        mesh, found = lab.Mesh(lab.Topology([("dp", 2)])), []
        ids, targets = (each[rank] for each in batch(CONFIG, 4, 2))
        for kind in ("ddp", "stage", "parts"):
            model, changes = build(CONFIG, mesh, None), []
            stage = model.stages[0]
            parts = [stage.embedding, *stage.layers, stage.norm, stage.head]
            units = [stage] if kind == "stage" else parts
            if kind == "ddp":
                optimizer = DDP(model, mesh)
            else:
                optimizer = Zero3(model, mesh, units=units, on_change=lambda *event: changes.append(event))  # noqa: B023
            changes.clear()
            model.begin_step(8 * ROWS * LENGTH, 8 * ROWS)
            runtime = lab.PipelineRuntime(
                program, {0: overlappable_stage(stage, 0)}, model.loss_fn(), group=mesh.group("pp"),
                overlapped=overlapped_forward_backward,
            )  # fmt: skip
            runtime.step(list(ids), list(targets), [1.0] * 4)
            if kind != "ddp":
                assert all(map(is_absent, stage.parameters())), "all are freed"
                for unit in range(len(units)):
                    runs = [event for event in changes if event[0] == unit]
                    num_flats = len(optimizer.reducer.units[unit].flats)
                    assert [held for _, held in runs].count(True) == num_flats * (8 - num_pairs)
                    assert len(runs) == 2 * num_flats * (8 - num_pairs)
            found.append(full_gradients(optimizer))
        return [max(float((other[n] - found[0][n]).abs().max()) for n in other) for other in found[1:]]

    assert num_pairs == 3
    for errors in lab.launch(fn, 2, timeout=120):
        assert max(errors) < LIMIT


def test_a_frozen_stage_in_pieces_under_zero_3_is_refused():
    """Nothing that it trains leads to the optimizer that holds its weights; they would be NaN."""

    def fn(rank, world_size):
        frozen, other = (build(CONFIG, lab.Mesh(lab.Topology([("ep", 1)])), None).stages[0] for _ in range(2))
        frozen.requires_grad_(False)
        stage, ids = overlappable_stage(frozen, 0), torch.zeros(1, LENGTH, dtype=torch.int64)
        stage.forward(0, (ids,))  # nothing is sharded yet
        stage.passes.clear()
        optimizer = Zero3(torch.nn.ModuleList([frozen, other]), units=[frozen, other])
        with pytest.raises(ValueError, match="stage 0 trains none; use DDP, Zero1 or Zero2, or a plain stage here"):
            stage.forward(0, (ids,))
        assert optimizer.num_steps == 0

    lab.launch(fn, 1)
