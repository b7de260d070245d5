"""ZeRO-3 in detail: what is whole when, recomputed units, the root, evaluation, and what is refused."""

import pytest
import torch
from models import launch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_runs import BATCHES, Blocks

from dualpipe_lab.dp.ema import ShardedEMA
from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.dp.sharded import full_gradients
from dualpipe_lab.dp.zero3 import Zero3

TOKENS, TARGETS = BATCHES[0]


def loss_of(model):
    return nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TARGETS.flatten())


def whole(optimizer):
    """Which units are whole; the root is the last."""
    return [any(flat.is_full for flat in unit.flats) for unit in optimizer.reducer.units]


@pytest.mark.parametrize("reshard", [True, False])
def test_gathers_are_asked_for_one_unit_ahead_and_units_are_held_while_they_work(reshard):
    """Every unit's memory is taken and given back in turn; without resharding, the forward gives nothing back."""

    def fn(rank, world_size):
        told = []
        model = Blocks(tied=False)
        model.blocks[1][0].bias.requires_grad_(True)  # one kind per unit
        units, seen = model.units, lambda unit, is_held: told.append((unit, is_held))
        optimizer = Zero3(model, units=units, on_change=seen, reshard_after_forward=reshard)
        del told[:]  # what making it took and gave back
        model.blocks[0][1].register_forward_hook(lambda *_: told.append(("block 0 works", True)))
        loss = loss_of(model)
        told.append(("backward", whole(optimizer)))
        loss.backward()
        assert not any(whole(optimizer))
        return told

    for told in launch(fn, 2):
        taken = [unit for unit, is_held in told if is_held]
        assert taken == [0, 1, 2, "block 0 works", 3, 4, "backward", *([4, 3, 2, 1, 0] if reshard else [])]
        assert dict(told)["backward"] == ([False] * 6 if reshard else [*[True] * 5, False])
        held = set()
        for unit, is_held in told:
            if unit not in ("block 0 works", "backward"):
                assert (unit in held) != is_held
                held ^= {unit}
                assert not reshard or len(held) <= 3  # two, and for a moment the one whose backward is just over
        given = [unit for unit, is_held in told if is_held is False]
        assert given[-5:] == [4, 3, 2, 1, 0]
        assert given[:-5] == ([0, 1, 2, 3, 4] if reshard else [])


@pytest.mark.on_gloo("torch's checkpoint looks at the device of saved tensors below the stand-in's mode")
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_recomputed_units_give_the_same_gradients_with_the_same_number_of_gathers(place):
    class Recomputing(Blocks):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = x + (checkpoint(block, x, use_reentrant=False) if place == "outside" else block(x))
            return self.head(x)

    class Inner(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    def fn(rank, world_size, recompute):
        model = Recomputing() if recompute else Blocks()
        if recompute and place == "inside":
            model.blocks = nn.ModuleList(Inner(block) for block in model.blocks)
        optimizer = Zero3(model, units=model.units)
        loss_of(model).backward()
        return [flat.grad for flat in optimizer.flats if flat.is_trained]

    plain, recomputed = launch(fn, 2, False), launch(fn, 2, True)
    for ours, theirs in zip(recomputed[0], plain[0], strict=True):
        assert torch.equal(ours, theirs)
        assert ours.abs().max() > 0 or ours.numel() == 2  # the shard of the parameter that nobody uses
    assert recomputed.ledger.count("all_gather_single") == plain.ledger.count("all_gather_single")


def test_evaluation_leaves_nothing_behind_and_absent_weights_are_known():
    def fn(rank, world_size):
        model = Blocks()
        expected = loss_of(model).item()
        optimizer = Zero3(model, units=model.units)
        with torch.no_grad():
            loss = loss_of(model).item()
        left = whole(optimizer)
        assert not optimizer.reducer.forwards  # which a long evaluation would let grow
        absent = is_absent(model.head.weight)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        with optimizer.gathered():
            present = model.head.weight.detach().isfinite().all().item()
        return loss == expected, left, absent, present, shapes == [tuple(p.shape) for p in Blocks().parameters()]

    for same, left, absent, present, shapes in launch(fn, 2):
        assert (same, any(left), absent, present, shapes) == (True, False, True, True, True)


def test_several_forwards_before_their_backwards():
    """What a pipeline does with microbatches."""

    def fn(rank, world_size):
        model = Blocks()
        optimizer = Zero3(model, units=model.units)
        loss_of(model).backward()
        once = [3 * flat.grad for flat in optimizer.flats if flat.is_trained]
        optimizer.zero_grad()
        for loss in [loss_of(model) for _ in range(3)]:
            loss.backward()
        assert not any(whole(optimizer))
        three = [flat.grad for flat in optimizer.flats if flat.is_trained]
        return all((ours - theirs).abs().max() <= 1e-12 for ours, theirs in zip(three, once, strict=True))

    assert all(launch(fn, 2))


A_LIST = r"takes a list of modules, units=\[block, \.\.\.\], got "
NO_UNITS = [
    (ValueError, r"unit 0 \(Blocks\) is not a submodule of Blocks", lambda model: [model]),
    (ValueError, r"unit 0 \(Linear\) is not a submodule", lambda model: [nn.Linear(1, 1)]),
    (ValueError, r"unit 0 \(Sequential\) lies inside of another unit", lambda model: [model.blocks[0], model.blocks]),
    (ValueError, r"unit 0 \(ModuleList\) has no forward, before which it would be", lambda model: [model.blocks]),
    (TypeError, A_LIST, lambda model: [None]),
    (TypeError, A_LIST, lambda model: model.head),
    (TypeError, A_LIST, lambda model: torch.distributed.group.WORLD),
]


def test_units_that_do_not_fit_are_refused():
    def fn(rank, world_size):
        for kind, message, units in NO_UNITS:
            model = Blocks()
            with pytest.raises(kind, match=message):
                Zero3(model, units=units(model))

    launch(fn, 1)


def test_a_second_derivative_is_refused_and_the_next_step_is_right():
    def fn(rank, world_size):
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer, found = Zero3(model), []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            found.append(full_gradients(optimizer)["0.weight"].abs().sum().item())
            optimizer.zero_grad()
            x = torch.ones(2, 3, requires_grad=True)
            with pytest.raises(ValueError, match=r"create_graph=True .* use Zero2 for gradient penalties"):
                torch.autograd.grad(model(x).sum(), x, create_graph=True)
            optimizer.zero_grad()
        return found

    for found in launch(fn, 2):
        assert found[0] == found[1] == found[2] > 0


class Modal(nn.Module):
    """Two encoders of one size; each batch names those it runs, in its order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, names):
        for name in names:
            x = getattr(self, name)(x)
        return self.head(x)


@pytest.mark.parametrize("reshard", [True, False])
def test_ranks_that_run_different_units_of_one_size_are_refused_and_equal_ones_are_not(reshard):
    """In step 1 and in step 3."""

    def fn(rank, world_size):
        optimizer = Zero3(Modal(), reshard_after_forward=reshard)
        found = []
        different = [["image"], ["text"]][rank]
        for names in (different, ["image", "text"], ["text"], ["text", "image"], different, ["image", "text"]):
            optimizer.zero_grad()
            optimizer.module(torch.ones(2, 4), names).sum().backward()
            try:
                optimizer.step()
            except ValueError as error:
                found.append(str(error))
        return found

    for found in launch(fn, 2):
        assert len(found) == 2
        assert all("different units of ZeRO-3, [[0, 2], [1, 2]] by rank" in sentence for sentence in found)


@pytest.mark.parametrize("reshard", [True, False])
def test_averages_reach_weights_that_are_gathered_already_and_leave_them_again(reshard):
    def fn(rank, world_size):
        model = Blocks()
        optimizer = Zero3(model, units=model.units, reshard_after_forward=reshard)
        averages = ShardedEMA(optimizer, 0.5)
        loss_of(model).backward()
        optimizer.step()
        with torch.no_grad(), averages.applied():
            expected = float(loss_of(model))
        with torch.no_grad(), optimizer.gathered():
            before = float(loss_of(model))
        with torch.no_grad(), optimizer.gathered(), averages.applied():
            during = [float(loss_of(model)) for _ in range(2)]
        with torch.no_grad(), optimizer.gathered():
            with averages.applied():
                pass
            after = float(loss_of(model))
        assert during == [expected, expected] != [before, before]
        assert after == before
        kept = loss_of(model)  # without resharding, the units stay full after this forward
        with torch.no_grad(), averages.applied():
            assert float(loss_of(model)) == expected
        return float(kept.detach()) == before

    assert all(launch(fn, 2))
