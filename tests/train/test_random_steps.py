"""What a step draws follows from seed, step and place; a step without an update changes nothing; bits repeat."""

import torch
from torch.nn.functional import dropout
from training_runs import LLAMA, OPTIONS, TEXT, V3, plan

import dualpipe_lab as lab
from dualpipe_lab import train
from dualpipe_lab.dp.checkpoint.state import sharded_state_dict
from dualpipe_lab.train.trainer import seed_of, seed_ranks


def trainer_of(config, chosen, **options):
    trainer = train.Trainer(config, chosen, train.TrainOptions(**OPTIONS, **options))
    return trainer, trainer.options.sampler(TEXT)


def drops(trainer, drawn):
    """Let every layer of a trainer drop features of its output, as a user's module would; the masks go to `drawn`."""

    def hook(module, inputs, output):
        if module.training:
            mask = dropout(torch.ones_like(output[0, 0]))
            drawn.append(tuple(mask.tolist()))
            return output * mask
        return output

    for stage in trainer.model.stages.values():
        for layer in stage.layers:
            layer.register_forward_hook(hook)


def dropping(rank, world_size, plans):
    """Losses, masks and an evaluation under each plan; the last step is taken again by a trainer that goes on there."""
    found = []
    for chosen in plans:
        drawn = []
        trainer, sampler = trainer_of(LLAMA, chosen)
        drops(trainer, drawn)
        losses = [trainer.step(trainer.batch(sampler)).loss for _ in range(3)]
        torch.manual_seed(rank)  # an evaluation, or a user, draws between the steps
        evaluation, num_drawn = trainer.evaluate(sampler), len(drawn)
        trainer.num_steps, before = 2, drawn[-num_drawn // 3 :]
        trainer.step(trainer.batch(sampler))
        assert drawn[num_drawn:] == before, "the masks of a step depend on the step alone"
        found.append((losses, drawn[:num_drawn], evaluation))
    return found


def test_a_module_drops_the_same_units_on_copies_and_others_elsewhere():
    """With one process, tp 2 (copies: equal losses), tp 2 that recomputes, and dp 2 (other data, other units)."""
    plans = [plan(tp=2), plan(tp=2, recompute=True), plan(dp=2)]
    (alone,) = lab.launch(dropping, 1, [plan()], timeout=240)[0]
    ranks = lab.launch(dropping, 2, plans, timeout=240)
    for number in (0, 1):
        for rank in (0, 1):
            losses, masks, evaluation = ranks[rank][number]
            assert torch.allclose(torch.tensor(losses).double(), torch.tensor(alone[0]).double(), rtol=1e-6)
            assert set(masks) == set(alone[1])
            assert abs(evaluation / alone[2] - 1) < 1e-10
    first, second = (set(ranks[rank][2][1]) for rank in (0, 1))
    assert len(first) == len(second) == 3 * LLAMA.num_layers
    assert not first & second


def everything(trainer):
    """A copy of all that a checkpoint would save of this rank's tensors, and of the number of updates."""
    tensors = {shard.name: shard.view.detach().clone() for shard in sharded_state_dict(trainer.optimizer)}
    return {**tensors, "updates": torch.tensor(trainer.optimizer.num_steps)}


def skipping(rank, world_size, chosen):
    """Take steps 1, 2 and 3, of which the second has no finite norm; and then 1 and 3 alone."""
    trainer, sampler = trainer_of(V3, chosen, ema=0.5)
    trainer.step(trainer.batch(sampler))
    before = everything(trainer)
    poison = [p.register_hook(lambda grad: grad * torch.inf) for p in trainer.model.parameters()] if rank == 0 else []
    skipped = trainer.step(trainer.batch(sampler))
    for handle in poison:
        handle.remove()
    assert not skipped.stepped
    same(everything(trainer), before)
    trainer.step(trainer.batch(sampler))

    other, _ = trainer_of(V3, chosen, ema=0.5)
    for other.num_steps in (0, 2):
        other.step(other.batch(sampler))
    found = everything(trainer)
    same(found, everything(other))
    assert any(name.startswith("buffer/") and bool(tensor.any()) for name, tensor in found.items()), "biases move"
    return sorted(found)


def same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_step_without_an_update_changes_nothing():
    """Weights, moments, averages, biases and loads: only the number of the step and the data go on."""
    names = lab.launch(skipping, 2, plan(ep=2), timeout=240)[0]
    kinds = {name.split("/")[0] for name in names}
    assert {"parameter", "exp_avg", "exp_avg_sq", "ema", "buffer", "updates"} <= kinds, kinds


def repeating(rank, world_size, plans, folder):
    """Under each plan: five steps; the same again; and three, a checkpoint, and a new trainer that takes two more."""
    for number, (config, chosen) in enumerate(plans):
        ends = []
        for saves in (False, False, True):
            options = {"ema": 0.9, "folder": folder / str(number)}
            trainer, sampler = trainer_of(config, chosen, **options)
            rows = [trainer.step(trainer.batch(sampler)) for _ in range(3)]
            if saves:
                path = trainer.save(sampler)
                trainer, sampler = trainer_of(config, chosen, **options)
                trainer.load(path)
            rows += [trainer.step(trainer.batch(sampler)) for _ in range(2)]
            ends.append(([(row.loss, row.norm) for row in rows], everything(trainer)))
        for losses, state in ends[1:]:
            assert losses == ends[0][0]
            same(state, ends[0][1])


def test_seed_plan_and_step_give_the_same_bits_also_after_a_resume(tmp_path):
    plans = [
        (LLAMA, plan(pp=2, num_microbatches=4, schedule="dualpipe")),
        (LLAMA, plan(dp=2, zero=3, precision="bfloat16")),
        (V3, plan(ep=2, zero=1)),
    ]
    lab.launch(repeating, 2, plans, tmp_path, timeout=240)


GRIDS = [lab.Topology([("pp", 2), ("dp", 2), ("tp", 2)]), lab.Topology([("dp", 2), ("ep", 2), ("cp", 2)])]


def mask(mesh, step):
    seed_ranks(7, mesh, step)
    return tuple(dropout(torch.ones(64)).tolist())


def drawing(rank, world_size):
    meshes = [lab.Mesh(grid) for grid in GRIDS]
    masks = [[mask(mesh, step) for step in (0, 1)] for mesh in meshes]
    assert mask(meshes[0], 0) == masks[0][0]
    return masks


def test_copies_drop_the_same_units_and_nobody_else_does():
    masks = lab.launch(drawing, 8, output="collect", timeout=120)
    for number, grid in enumerate(GRIDS):
        assert len({drawn for found in masks for drawn in found[number]}) == 2 * 8 // grid.size("tp")
    for first in range(0, 8, 2):  # the ranks of a tp group
        assert masks[first][0] == masks[first + 1][0]


def test_no_two_places_share_a_seed():
    grid = lab.Topology([("pp", 4), ("dp", 4), ("cp", 2), ("tp", 4)])
    seeds = {
        seed_of(seed, grid.coordinates(rank), step) for seed in range(4) for step in range(4) for rank in range(128)
    }
    assert len(seeds) == 4 * 4 * 128
    assert seed_of(1, {"pp": 0, "dp": 2}) == seed_of(1, {"dp": 2})
    assert all(0 <= seed < 2**64 for seed in seeds)
