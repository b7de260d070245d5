"""What a launch gives back, whatever was passed in."""

import os
import types
import warnings
from dataclasses import dataclass
from enum import Enum
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import dualpipe_lab as lab


def test_classes_enums_and_modules_made_in_a_cell_travel_and_return_as_themselves():
    @dataclass
    class Config:
        width: int

    class Colour(Enum):
        RED = 1

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    helpers = types.ModuleType("helpers")
    exec("def triple(x):\n    return 3 * x", helpers.__dict__)
    model = Model()

    def fn(rank, world_size):
        x = torch.ones(1, requires_grad=True)
        Double.apply(x).backward()
        return Config(helpers.triple(rank)), Colour.RED, model.layer.weight, x.grad.item()

    config, colour, weight, grad = lab.launch(fn, 2)[1]
    assert type(config) is Config
    assert config == Config(3)
    assert colour is Colour.RED
    assert torch.equal(weight, model.layer.weight)
    assert grad == 2


def test_a_view_returns_without_the_storage_it_looks_into():
    from dualpipe_lab.launch import payload

    assert len(payload.dumps(torch.zeros(1_000_000)[:10])) < 2_000


def refuse_handle(tensor):
    raise AssertionError("a tensor was handed to multiprocessing, which sends a handle to shared memory")


def test_tensors_travel_as_bytes_though_torch_s_multiprocessing_would_share_them():
    captured, given = torch.arange(3.0), torch.ones(3)

    def fn(rank, world_size, given):
        ForkingPickler.register(torch.Tensor, refuse_handle)
        shared = given.is_shared() or captured.is_shared()
        given += rank
        captured.zero_()
        return shared, given

    ForkingPickler.register(torch.Tensor, refuse_handle)
    try:
        with pytest.raises(AssertionError, match="a handle to shared memory"):
            ForkingPickler.dumps(given)
        results = lab.launch(fn, 2, given)
    finally:
        ForkingPickler.register(torch.Tensor, torch.multiprocessing.reductions.reduce_tensor)
    assert [(shared, tensor.tolist()) for shared, tensor in results] == [(False, [1, 1, 1]), (False, [2, 2, 2])]
    assert not any(tensor.is_shared() for tensor in [*(tensor for _, tensor in results), given, captured])
    assert (given.sum(), captured.sum()) == (3, 3)  # the ranks changed copies


def test_a_large_captured_tensor_is_spooled_once_with_a_warning():
    big = torch.zeros(3_000_000)

    def fn(rank, world_size):
        return big.sum().item()

    with pytest.warns(UserWarning, match=r"11 MB to every rank \(the largest is big, 11 MB\)"):
        assert lab.launch(fn, 2) == [0.0, 0.0]


def test_a_small_payload_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lab.launch(lambda rank, world_size: None, 1)


def test_ranks_see_this_process_environment_folder_and_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_SETTING", "7")
    monkeypatch.chdir(tmp_path)
    fn = lambda rank, world_size: (os.environ["COURSE_SETTING"], os.getcwd(), torch.get_num_threads())  # noqa: E731
    assert lab.launch(fn, 1) == [("7", str(tmp_path), 1)]
    assert lab.launch(fn, 1, threads=2)[0][2] == 2


def test_ranks_and_launches_draw_other_numbers_and_the_callers_seed_repeats_them(subtests):
    """Ranks once inherited the generator of the fork server: dropout was the same on all ranks and in all launches."""

    def fn(rank, world_size):
        import random

        import numpy as np

        mask = torch.nn.functional.dropout(torch.ones(64)).tolist()
        return torch.rand(()).item(), random.random(), float(np.random.rand()), tuple(mask)

    for start in (None, "spawn"):
        with subtests.test(start=start):
            torch.manual_seed(5)
            launches = [lab.launch(fn, 2, start=start) for _ in range(2)]
            after = torch.rand(())
            every = [values for launch in launches for values in launch]
            assert all(len(set(drawn)) == 4 for drawn in zip(*every, strict=True)), every
            torch.manual_seed(5)
            assert [lab.launch(fn, 2, start=start) for _ in range(2)] == launches
            assert torch.rand(()) == after
            torch.manual_seed(6)
            assert not set(lab.launch(fn, 2, start=start)) & set(every)


def test_ranks_may_start_processes_of_their_own():
    def fn(rank, world_size):
        import multiprocessing

        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.map(abs, [-1])

    assert lab.launch(fn, 1) == [[1]]


def test_launches_from_several_threads_do_not_disturb_one_another():
    import sys
    from concurrent.futures import ThreadPoolExecutor

    main = sys.modules["__main__"]
    with ThreadPoolExecutor(3) as pool:
        outs = list(pool.map(lambda n: lab.launch(lambda rank, world_size: rank * n, 2, output="collect"), range(6)))
    assert outs == [[0, n] for n in range(6)]
    assert sys.modules["__main__"] is main
