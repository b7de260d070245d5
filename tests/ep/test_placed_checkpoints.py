"""Checkpoints and state dicts of placed experts have each expert once, and any other placement goes on from them."""

import pytest
import torch
from ep_runs import distance
from placed_runs import CONFIG, Run, check, equal_replicas, plan
from runs import A1, launch

import dualpipe_lab as lab
from dualpipe_lab import dp
from dualpipe_lab.dp.checkpoint.reader import Checkpoint
from dualpipe_lab.ep.moving_experts import full_experts
from dualpipe_lab.ep.placed_experts import trivial_placement
from dualpipe_lab.tp.checkpoint import load_state_dict_file, save_state_dict_file
from dualpipe_lab.tp.shard import full_state_dict, load_full_state_dict

WAYS = {  # ranks, stage, slots of the placement and its ranks
    "other slots": (lab.Topology([("ep", 4)]), "zero2", (16, 4)),
    "full buffers": (lab.Topology([("dp", 2), ("ep", 2)]), "ddp", (10, 2)),
    "units": (lab.Topology([("dp", 4)], edp=2), "zero3", (12, 2)),
    "no slots": (lab.Topology([("dp", 2), ("ep", 2)]), "zero1", None),
    "one process": (lab.Topology([("dp", 1)]), "ddp", None),
}


def start(way):
    topology, stage, slots = WAYS[way]
    placement = None if slots is None else plan(slots[1], slots[0])
    return Run(topology, stage, placement)


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero3"])
def test_any_placement_goes_on_from_any_other(stage, tmp_path):
    """Saved with replicas after a move: the third step is that of the run that goes on."""

    def first(rank, world_size):
        run = Run(lab.Topology([("dp", 2), ("ep", 2)]), stage, plan(2))
        run.train(moves=3, steps=2)
        path = dp.checkpoint.save(tmp_path / stage, 2, run.optimizer, topology=run.mesh.topology)
        found = [run.step(2)[:3]]
        return path, (found, run.full(), run.replicas())

    def others(rank, world_size, path, way):
        run = start(way)
        dp.checkpoint.load(path, run.optimizer)
        if run.layers:
            equal_replicas(run.replicas())
        return [run.step(2)[:3]], run.full(), run.replicas()

    saved = launch(first, 4)
    path, expected = saved[0]
    entries = Checkpoint(path).index.tensors
    assert entries["parameter/layers.1.mlp.experts.gate"].shape == (8, 6, 8)
    full = sum(v.numel() for v in expected[1].values())
    numels = [s.region.numel for name, e in entries.items() if name.startswith("exp_avg_sq/") for s in e.shards]
    assert sum(numels) == full  # each expert once
    for way in list(WAYS) if stage == "zero1" else ["other slots", "one process"]:
        for found in launch(others, WAYS[way][0].world_size, path, way):
            check(found, expected)


def test_state_dicts_have_experts_by_number(tmp_path):
    """Full state dicts, of weights and of gradients, and their file, there and back."""

    def fn(rank, world_size):
        plain, placed = (Run(lab.Topology([("ep", 4)]), "ddp", each) for each in (None, plan(4)))
        for run in (plain, placed):
            run.step(0)
        file = tmp_path / "weights.safetensors"
        weights, layer = placed.model.full_state_dict(), placed.layers[0]
        worst = [distance(weights[name], value) for name, value in plain.model.full_state_dict().items()]
        of_layer = full_state_dict(layer, layer.ep.group)
        worst += [distance(of_layer[name], value) for name, value in full_experts(layer).items()]
        before = [parameter.detach().clone() for parameter in layer.weights]
        save_state_dict_file(layer, file, layer.ep.group)
        for load in (lambda: load_state_dict_file(layer, file), lambda: load_full_state_dict(layer, of_layer)):
            for parameter in layer.weights:
                parameter.data.zero_()
            load()
            assert all(torch.equal(a, b) for a, b in zip(before, layer.weights, strict=True))
        assert tuple(of_layer["gate"].shape) == (CONFIG.num_experts, CONFIG.expert_ffn_size, CONFIG.hidden_size)
        return max(worst)

    assert max(launch(fn, 4)) <= A1


def test_masters_averages_and_nodes_move_along():
    """Hybrid ZeRO-1 in bf16 with fp32 masters and a moving average: state is by expert what it was before the move."""
    topology = lab.Topology([("dp", 4), ("ep", 2)], ranks_per_node=4)

    def by_expert(run):
        return [rows[[table.index(e) for e in range(CONFIG.num_experts)]] for table, rows in run.replicas()]

    def fn(rank, world_size):
        options = {"dtype": torch.bfloat16, "master": True, "grad_dtype": torch.float32, "hybrid": True}
        run = Run(topology, "zero1", plan(2), **options)
        average = dp.ShardedEma(run.optimizer, 0.5)
        for step in range(2):
            run.step(step)
            average.update()
        equal_replicas(run.replicas())
        before, table = by_expert(run), run.layers[0].table
        loads = [torch.arange(8.0) + 1, 8 - torch.arange(8.0)]
        lab.ep.rebalance(run.layers, loads, run.optimizer, 4)
        equal_replicas(run.replicas())
        assert table != run.layers[0].table
        assert all(torch.equal(a, b) for a, b in zip(before, by_expert(run), strict=True))
        working = [full_experts(layer)["gate"].flatten(1).float() for layer in run.layers]
        masters = [rows[:, : part.shape[1]].bfloat16().float() for rows, part in zip(before, working, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(working, masters, strict=True))
        run.step(2)
        equal_replicas(run.replicas())
        return True

    assert all(launch(fn, 8))


def test_what_slots_cannot_do_is_refused():
    """A plain group, random rounding, and copies with other experts in their slots; nothing has changed."""

    def fn(rank, world_size):
        topology, texts = lab.Topology([("dp", 2), ("ep", 2)]), []
        mesh, run = lab.Mesh(topology), Run(topology, "ddp", plan(2))
        alone = [lab.comm.new_group([r]) for r in range(4)][rank]
        other = plan(2) if mesh.rank("dp") else trivial_placement(8, 2)
        for call in (
            lambda: dp.Ddp(run.layers[0], alone),
            lambda: dp.Zero1(run.model, mesh, dp.ZeroOptions(rounding_seed=1)),
            lambda: Run(topology, "zero1", other),
            lambda: lab.ep.move_experts(run.layers[0], plan(2), dp.Ddp(torch.nn.Linear(2, 2), mesh)),
        ):
            with pytest.raises(ValueError, match=r"got|hold|add") as caught:
                call()
            texts.append(str(caught.value))
        return texts

    for texts in launch(fn, 4):
        assert "give an optimizer the Mesh in place of the group" in texts[0]
        assert "got rounding_seed=1 for experts with a placement; use master=True" in texts[1]
        assert "give all ranks one placement" in texts[2]
        assert "make the optimizer over the Mesh, after place_experts" in texts[3]
