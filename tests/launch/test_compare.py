"""`compare_backends`: one line where two back ends agree, the place where they do not."""

import re

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab.launch.compare import largest_difference


def test_one_line_says_how_far_they_are_apart(on_stand_in, capsys):
    def fn(rank, world_size, x):
        lab.comm.all_reduce(x)
        print("not shown")
        return {"sum": x, "rank": rank}

    x = torch.ones(3)
    found = lab.compare_backends(fn, 2, x, tolerance=1e-6, rounds=2)
    assert [value["rank"] for value in found] == [0, 1]
    assert found[1]["sum"].tolist() == [2.0, 2.0, 2.0]  # of the first call: the second got its own copy
    line = r"2 ranks on NCCL agree with GLOO: largest difference 0\.0e\+00 of at most 1\.0e-06; "
    line += r"\d+\.\d\d ms between CUDA events, median of the ranks and of 1 call after the first\n"
    assert re.fullmatch(line, capsys.readouterr().out)


def test_the_place_of_the_largest_difference_is_named(on_stand_in):
    def fn(rank, world_size):
        return {"loss": [1.0, 2.0 + 0.5 * (lab.device().type == "cuda") * rank]}

    with pytest.raises(AssertionError, match=r"results\[1\]\.loss\[1\] 5.0e-01 apart, at most 1.0e-05 allowed"):
        lab.compare_backends(fn, 2, tolerance=1e-5)


@pytest.mark.parametrize(
    "options", [{"tolerance": -1}, {"tolerance": 1, "rounds": 0}, {"tolerance": 1, "backend": "gloo"}]
)
def test_bad_arguments_start_no_process(options):
    with pytest.raises(ValueError, match="compare_backends"):
        lab.compare_backends(lambda rank, world_size: None, 2, **options)


@pytest.mark.parametrize(
    ("left", "right", "place", "size"),
    [
        (torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [0.25, 0.0]]), "[1, 0]", 0.25),
        ({"a": [1, 2]}, {"a": [1, 4]}, "a[1]", 2.0),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), "", 0.0),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "[1]", float("inf")),
        (torch.zeros(2), torch.zeros(3), "", float("inf")),
        ([1, "a"], [1, "b"], "[1]", float("inf")),
        ((1, None), (1, None), "", 0.0),
        (float("nan"), 1.0, "", float("inf")),
        (torch.tensor(2), torch.tensor(5), "", 3.0),
        ([1], [1, 2], "[1]", float("inf")),
        ([torch.zeros(0)], [torch.zeros(0)], "[0]", 0.0),
    ],
)
def test_nested_results_differ_at_a_place(left, right, place, size):
    found = largest_difference(left, right)
    assert found.size == size
    assert found.place == place or not size
