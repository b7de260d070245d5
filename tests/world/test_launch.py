"""What a launch gives back, and what it refuses before any process starts."""

import os
import types
import warnings
from dataclasses import dataclass
from enum import Enum

import pytest
import torch

import dualpipe_lab as lab


def test_values_come_back_in_rank_order_with_their_arguments():
    offset = 10

    def fn(rank, world_size, factor):
        return rank * factor + offset, world_size

    assert lab.launch(fn, 3, 2) == [(10, 3), (12, 3), (14, 3)]


def test_one_rank_is_a_world():
    def fn(rank, world_size):
        x = torch.ones(3)
        lab.comm.all_reduce(x)
        return x.tolist()

    out = lab.launch(fn, 1)
    assert out == [[1.0, 1.0, 1.0]]
    assert out.ledger.sent() == 0


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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(2, dtype=torch.float64, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ],
    ids=str,
)
def test_tensors_return_bitwise(tensor):
    back = lab.launch(lambda rank, world_size: tensor, 1)[0]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.requires_grad == tensor.requires_grad
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_a_view_returns_without_the_storage_it_looks_into():
    from dualpipe_lab.world import payload

    assert len(payload.dumps(torch.zeros(1_000_000)[:10])) < 2_000


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


def test_ranks_draw_different_numpy_and_python_random_numbers():
    def fn(rank, world_size):
        import random

        import numpy as np

        return random.random(), float(np.random.rand())

    (python0, numpy0), (python1, numpy1) = lab.launch(fn, 2)
    assert python0 != python1
    assert numpy0 != numpy1


def test_changes_to_captured_globals_stay_in_the_rank():
    counter = {"n": 0}

    def fn(rank, world_size):
        counter["n"] += 1
        return counter["n"]

    assert lab.launch(fn, 2) == [1, 1]
    assert counter["n"] == 0


def _chatty(rank, world_size):
    import sys

    for line in range(3):
        print(f"{rank}.{line} é")
    print(f"warn {rank}", file=sys.stderr)


def test_ordered_output_is_in_rank_order(capsys):
    lab.launch(_chatty, 3)
    captured = capsys.readouterr()
    assert captured.out.split("\n") == [f"{rank}.{line} é" for rank in range(3) for line in range(3)] + [""]
    assert captured.err.split("\n") == [f"warn {rank}" for rank in range(3)] + [""]


def test_live_output_names_the_rank_of_each_line(capsys):
    lab.launch(_chatty, 2, output="live")
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {r}] {r}.{i} é" for r in range(2) for i in range(3)]


def test_collected_output_is_not_printed(capsys):
    out = lab.launch(_chatty, 2, output="collect")
    assert capsys.readouterr().out == ""
    assert out.output[1].splitlines() == ["1.0 é", "1.1 é", "1.2 é"]


def test_output_of_subprocesses_and_c_code_is_caught(capsys):
    def fn(rank, world_size):
        os.write(1, b"from C\n")
        os.system("echo from a shell")

    lab.launch(fn, 1)
    assert capsys.readouterr().out == "from C\nfrom a shell\n"


def test_a_flood_of_output_is_cut_and_said_so():
    def fn(rank, world_size):
        for _ in range(500):
            print("x" * 99_999)

    text = lab.launch(fn, 1, output="collect").output[0]
    assert 4_000_000 < len(text) < 4_100_000
    assert text.endswith("the rest is dropped]\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size to be a whole number from 1, got 0"),
        ({"world_size": 2.0}, "got 2.0"),
        ({"threads": 0}, "threads to be a whole number from 1"),
        ({"timeout": 0}, "timeout > 0 seconds, got 0"),
        ({"output": "loud"}, "output=ordered, live, collect, got 'loud'"),
        ({"clock": "sun"}, "clock=wall, virtual, got 'sun'"),
        ({"backend": "mpi"}, "backend=gloo, nccl, got 'mpi'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        lab.launch(_chatty, **{"world_size": 1, **arguments})


def test_nccl_without_gpus_says_so_and_the_guard_skips_the_cell(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="NCCL needs"):
        lab.launch(_chatty, 2, backend="nccl")
    assert not lab.nccl_ready(2)
    assert capsys.readouterr().out.startswith("skipped: NCCL needs")


def test_what_cannot_travel_is_refused_with_a_remedy():
    import threading

    lock = threading.Lock()

    def fn(rank, world_size):
        return lock

    with pytest.raises(TypeError, match="create such objects inside fn"):
        lab.launch(fn, 2)
    with pytest.raises(TypeError, match="got int"):
        lab.launch(3, 2)


def test_a_result_that_cannot_travel_names_the_rank():
    with pytest.raises(lab.RankError, match="rank 0 of 1 raised TypeError: cannot pickle 'generator'"):
        lab.launch(lambda rank, world_size: (i for i in range(3)), 1)


def test_ranks_cannot_launch_ranks():
    with pytest.raises(lab.RankError, match="launch was called inside a rank"):
        lab.launch(lambda rank, world_size: lab.launch(print, 1), 1)


def test_comm_and_compute_outside_of_a_rank_say_where_they_belong():
    for call in (lambda: lab.compute(1), lambda: lab.comm.all_reduce(torch.ones(1))):
        with pytest.raises(RuntimeError, match="no rank here"):
            call()


def test_ranks_may_start_processes_of_their_own():
    def fn(rank, world_size):
        import multiprocessing

        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.map(abs, [-1])

    assert lab.launch(fn, 1) == [[1]]


def test_a_function_that_does_not_take_the_arguments_is_refused_before_any_process_starts(leftovers):
    def fn(rank):
        return rank

    with pytest.raises(TypeError, match=r"but fn\(rank\) does not fit: too many positional arguments"):
        lab.launch(fn, 2)
    with pytest.raises(TypeError, match="with 1 further arguments"):
        lab.launch(lambda rank, world_size: None, 2, "extra")
    leftovers.check()


def test_sizes_and_links_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="128 at most, got world_size=1000; use simulate"):
        lab.launch(_chatty, 1000)
    with pytest.raises(ValueError, match="link to be a Link"):
        lab.launch(_chatty, 1, link=1.0)


def test_launches_from_several_threads_do_not_disturb_one_another():
    import sys
    from concurrent.futures import ThreadPoolExecutor

    main = sys.modules["__main__"]
    with ThreadPoolExecutor(3) as pool:
        outs = list(pool.map(lambda n: lab.launch(lambda rank, world_size: rank * n, 2, output="collect"), range(6)))
    assert outs == [[0, n] for n in range(6)]
    assert sys.modules["__main__"] is main


def test_sixteen_ranks():
    def fn(rank, world_size):
        x = torch.tensor([rank])
        lab.comm.all_reduce(x)
        return x.item()

    assert lab.launch(fn, 16) == [120] * 16
