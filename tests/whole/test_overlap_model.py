"""A V3 model in pieces, its experts overlapped: loss, gradients and loads of one process; units of ZeRO-3; refusals."""

from dataclasses import replace

import pytest
import torch
from runs import A1
from stage_runs import LATENT, LENGTH, ROWS, V3, batch, build, check_cuts

import dualpipe_lab as lab
from dualpipe_lab.dp import DDP, Zero1, Zero2, Zero3
from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.ep.overlap import overlappable_stage, overlapped_forward_backward
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import Overlap

BARE = replace(V3, num_shared_experts=0, balance=0.0)
SHARDED, AGAIN, CHUNK, SECOND = {"sequence_parallel": True}, {"recompute": True}, {"loss_chunk": 5}, {"mtp": 0.3}
BOTH, STRIPED = SECOND | CHUNK, {"layout": "striped"}
PIPE = ("pp", 2)
EP, TP, CP, DP = ([PIPE, (axis, 2)] for axis in ("ep", "tp", "cp", "dp"))
EP_TP, EP_CP, EP_DP, RING = [*EP, ("tp", 2)], [*EP, ("cp", 2)], [*EP, ("dp", 2)], [("cp", 2), ("ep", 2)]
# config, axes, schedule, layers of the stages, options; the first rows of each list differ most
CUTS = {
    "experts": [
        (V3, EP, "dualpipe", [3, 2], {"plainly": (0,)}),
        (V3, EP, "zero_bubble_h1", [2, 3], AGAIN | {"num_microbatches": 3}),
        (BARE, EP, "dualpipe", [1, 4], {}),
        (V3, EP, "dualpipe", [4, 1], {"hook": "serial"}),
        (V3, EP, "dualpipev", [2, 1, 1, 1], {}),
        (V3, EP, "dualpipe", [3, 2], {"plainly": (1,)}),
    ],
    "latents": [(LATENT, TP, "dualpipe", [2, 3], SHARDED), (LATENT, CP, "dualpipev", [2, 1, 1, 1], STRIPED | AGAIN)],
    "three axes": [
        (V3, EP_TP, "dualpipe", [2, 3], SHARDED),
        (V3, EP_CP, "dualpipev", [1, 1, 2, 1], STRIPED | {"plainly": (2,)}),
        (V3, EP_TP, "dualpipev", [2, 1, 1, 1], AGAIN),
        (V3, [("pp", 4), ("ep", 2)], "dualpipe", [2, 1, 1, 1], {"num_microbatches": 8}),
        (V3, [*CP, ("tp", 2)], "dualpipev", [2, 1, 1, 1], {"layout": "zigzag", **SHARDED}),
    ],
    "layouts and a balance loss": [
        (V3, CP, "dualpipe", [2, 3], STRIPED | AGAIN | {"zero": Zero2}),
        (V3, CP, "dualpipe", [2, 3], {"layout": "contiguous", "zero": Zero3}),
        (V3, RING, "1f1b", [5], {"plainly": (0,), "layout": "zigzag", "num_microbatches": 3}),
        (V3, CP, "dualpipe", [2, 3], STRIPED | {"zero": DDP, "hook": "serial"}),
    ],
    "data ranks": [
        (V3, EP_DP, "dualpipev", [2, 1, 1, 1], {"zero": Zero3}),
        *((V3, EP_DP, "dualpipe", [2, 3], {"zero": zero}) for zero in (Zero2, DDP, Zero1, Zero3)),
    ],
    "a loss in chunks": [
        (V3, TP, "dualpipe", [2, 3], SHARDED | CHUNK),
        (V3, RING, "paired_1f1b", [5], CHUNK | STRIPED | {"num_microbatches": 3}),
        (V3, EP, "paired_zero_bubble_h1", [3, 2], CHUNK),
        (BARE, EP, "dualpipev", [2, 1, 1, 1], CHUNK | AGAIN),
    ],
    "a second token": [  # whose layer has pieces of its own; head and table are used twice
        (V3, CP, "dualpipe", [2, 3], STRIPED | AGAIN | BOTH),
        (V3, EP, "paired_1f1b", [5, 0], SECOND),
        (V3, EP, "dualpipe", [3, 2], {"plainly": (0,), **BOTH}),
        (V3, TP, "dualpipev", [2, 1, 1, 1], SHARDED | SECOND),
        (V3, EP, "zero_bubble_h1", [2, 3], AGAIN | BOTH | {"num_microbatches": 3}),
        (V3, EP, "paired_zero_bubble_h1", [3, 2], SECOND),
        (BARE, EP, "dualpipe", [1, 4], BOTH),
        (V3, EP, "dualpipe", [2, 3], {"hook": "serial", **SECOND}),
        (V3, RING, "paired_1f1b", [5], STRIPED | BOTH | {"num_microbatches": 3}),
    ],
    "losses with weights": [
        (V3, DP, "dualpipe", [2, 3], {"zero": Zero3, **BOTH}),
        (V3, [("dp", 4)], "paired_1f1b", [5], {"zero": Zero2, "num_microbatches": 3, **BOTH}),
        (V3, DP, "dualpipev", [2, 1, 1, 1], {"zero": Zero3, **BOTH}),
        (V3, DP, "dualpipe", [2, 3], {"zero": DDP, **BOTH}),
        (V3, DP, "dualpipe", [2, 3], {"zero": Zero1, **BOTH}),
    ],
}


def test_stages_in_pieces_have_the_gradients_and_loads_of_one_process(amount, subtests):
    for what, rows in CUTS.items():
        cuts = {
            number: (config, axes, [name], {"hook": "overlapped", "layers": layers, **options})
            for number, (config, axes, name, layers, options) in enumerate(rows[: amount(9, 3)])
        }
        with subtests.test(what=what):
            check_cuts(cuts)


def test_experts_that_are_dispatched_node_by_node_are_refused():
    def fn(rank, world_size):
        module = build(V3, lab.Mesh(lab.Topology([("ep", 1)])), None).stages[0]
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
        ids, targets = (each[rank] for each in batch(V3.vocabulary_size, 4, 2))
        for kind in ("ddp", "stage", "parts"):
            model, changes = build(V3, mesh, None), []
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
        assert max(errors) < A1


def test_a_frozen_stage_in_pieces_under_zero_3_is_refused():
    """Nothing that it trains leads to the optimizer that holds its weights; they would be NaN."""

    def fn(rank, world_size):
        frozen, other = (build(V3, lab.Mesh(lab.Topology([("ep", 1)])), None).stages[0] for _ in range(2))
        frozen.requires_grad_(False)
        stage, ids = overlappable_stage(frozen, 0), torch.zeros(1, LENGTH, dtype=torch.int64)
        stage.forward(0, (ids,))  # nothing is sharded yet
        stage.passes.clear()
        optimizer = Zero3(torch.nn.ModuleList([frozen, other]), units=[frozen, other])
        with pytest.raises(ValueError, match="stage 0 trains none; use DDP, Zero1 or Zero2, or a plain stage here"):
            stage.forward(0, (ids,))
        assert optimizer.num_steps == 0

    lab.launch(fn, 1)
