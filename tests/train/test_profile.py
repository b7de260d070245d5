"""Costs by module: kept bytes equal the closed form, parts are no larger than the whole, calls add up."""

import time

import pytest
import torch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab import models
from dualpipe_lab.plan.saved_activations import LayerTable
from dualpipe_lab.train import profile_modules

CONFIG = models.LlamaConfig(64, 32, ffn_size=48, num_heads=8, num_kv_heads=4)
COLUMNS = "parameters", "kept_bytes", "forward", "backward"


def kept(module, x):
    """Kept bytes by name of a step that sums what a module returns."""
    return {row.name: row.kept_bytes for row in profile_modules(module, lambda: module(x).sum().backward())}


class Wait(torch.autograd.Function):
    """Ten milliseconds of forward and twenty of backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        time.sleep(0.02)
        return dy


class Waits(nn.Module):
    def forward(self, x):
        return Wait.apply(x)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.waits, self.linear = Waits(), nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.linear(self.waits(self.linear(self.waits(x))))


def test_a_layer_keeps_what_the_closed_form_says():
    def fn(rank, world_size):
        layer = models.Llama(CONFIG, lab.Topology([("tp", 1)]), dtype=torch.float64).layers[0]
        return kept(layer, torch.randn(2, 12, 32, dtype=torch.float64, requires_grad=True))

    ((_, found), *parts) = lab.launch(fn, 1)[0].items()
    table = LayerTable(CONFIG, lab.Plan(precision="float64"), num_rows=2, length=12)
    assert found == table.layer_bytes
    assert dict(parts)["mlp"] == table.boundary_bytes + sum(table.network().values())


def test_on_a_device_times_are_between_its_events(on_stand_in):
    def fn(rank, world_size):
        module, x = Twice().to(lab.device()), torch.ones(2, 3, device=lab.device(), requires_grad=True)
        rows = profile_modules(module, lambda: module(x).sum().backward())
        return [(row.calls, row.kept_bytes, row.forward, row.backward) for row in rows]

    whole, waits, linear = lab.launch(fn, 1, backend="nccl")[0]
    assert (whole[:2], waits[:2], linear[:2]) == ((1, 48), (2, 0), (2, 48))
    assert 0.02 <= waits[2] <= whole[2]
    assert 0.04 <= waits[3] <= whole[3]


def test_parts_are_no_larger_than_the_whole_and_rows_are_in_the_model_s_order():
    model, ids = models.PlainLlama(CONFIG, torch.float64), torch.zeros(1, 8, dtype=torch.long)
    rows = profile_modules(model, lambda: model.loss(ids, ids).backward())
    assert [row.name for row in rows[:3]] == ["PlainLlama", "embedding", "layers.0"]
    by_name = {"" if row is rows[0] else row.name: row for row in rows}
    for name, row in by_name.items():
        parts = [by_name[one] for one in by_name if one and is_part(one, name, by_name)]
        for column in COLUMNS:
            assert sum(getattr(part, column) for part in parts) <= getattr(row, column) * (1 + 1e-12), (name, column)
    assert by_name[""].backward > 0
    assert {row.name for row in profile_modules(model, lambda: model(ids), 2)} == {
        "PlainLlama", "embedding", "layers.0", "layers.1", "norm", "head"
    }  # fmt: skip


def is_part(one, name, names):
    """Whether a module's nearest one around it among `names` is `name`."""
    around = [other for other in names if other != one and (not other or one.startswith(f"{other}."))]
    return max(around, key=len) == name


def test_a_module_that_is_called_twice_counts_twice_and_times_are_of_the_module_that_waits():
    module, x = Twice(), torch.ones(2, 3, requires_grad=True)
    step = lambda: module(x).sum().backward()  # noqa: E731
    step()
    begin = time.perf_counter()
    whole, waits, linear = profile_modules(module, step)
    assert whole.forward + whole.backward <= time.perf_counter() - begin
    assert (whole.calls, waits.calls, linear.calls) == (1, 2, 2)
    assert (whole.parameters, linear.parameters, linear.kept_bytes, waits.kept_bytes) == (9, 9, 2 * 24, 0)
    assert 0.02 <= waits.forward <= whole.forward
    assert 0.04 <= waits.backward <= whole.backward
    assert waits.backward + linear.backward <= whole.backward


def test_what_a_module_does_before_it_calls_a_part_is_not_of_the_part():
    part = nn.Linear(3, 3)
    module = nn.Sequential(part)
    module.forward = lambda x: part(Wait.apply(x))
    x = torch.ones(2, 3, requires_grad=True)
    whole, linear = profile_modules(module, lambda: module(x).sum().backward())
    assert whole.forward - linear.forward >= 0.01
    assert whole.backward - linear.backward >= 0.02


def test_a_frozen_weight_keeps_no_input_and_two_users_of_a_tensor_keep_it_once():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    assert kept(nn.Sequential(first, second), x) == {"Sequential": 48, "0": 24, "1": 24}
    first.weight.requires_grad_(False)
    assert kept(nn.Sequential(first, second), x) == {"Sequential": 24, "0": 0, "1": 24}
    for one in (first, second):
        one.requires_grad_(True)
    both = nn.ModuleList([first, second])
    both.forward = lambda x: first(x) + second(x)
    assert kept(both, x) == {"ModuleList": 24, "0": 24, "1": 0}


def test_microbatches_count_each_though_they_take_the_same_memory_again():
    """The backward of the first has returned its storages: they are neither held nor mistaken for the second's."""
    layer = nn.Linear(1000, 1000, bias=False)

    def step(times):
        for _ in range(times):
            layer(torch.ones(10, 1000)).sum().backward()

    found = [profile_modules(layer, lambda times=times: step(times))[0].kept_bytes for times in (1, 3)]
    assert found == [40_000, 120_000]


def test_no_hook_is_left_and_the_gradients_are_those_without():
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    layer(x).square().sum().backward()
    plain, layer.weight.grad = layer.weight.grad, None
    profile_modules(layer, lambda: layer(x).square().sum().backward())
    assert torch.equal(plain, layer.weight.grad)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_a_change_in_place_is_noticed_and_a_part_that_fails_leaves_the_others_right():
    """torch checks what it saves itself, and leaves that to a hook; a model may catch an error of its part."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        profile_modules(model, lambda: model(torch.ones(2, 3)).mul_(2).sum().backward())

    class Falls(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 3)

        def forward(self, x):
            try:
                return self.second(self.first(x))
            except RuntimeError:
                return self.second(x)

    falls = Falls()
    rows = profile_modules(falls, lambda: falls(torch.ones(2, 3)).sum().backward())
    assert [(row.name, row.calls) for row in rows] == [("Falls", 1), ("first", 1), ("second", 2)]
    assert rows[0].forward >= rows[1].forward + rows[2].forward > 0
    with pytest.raises(ValueError, match="step calls no part of Falls"):
        profile_modules(falls, lambda: None)
