"""When ranks that wait count as stuck; what is then said of them is in `drills/test_launch_drills.py`."""

from collections import Counter

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.record.operation import Communicator
from dualpipe_lab.launch.record.rank_status import Blocked, RankStatus
from dualpipe_lab.launch.supervise.diagnosis import is_stuck


def test_check_lets_torch_compare_collectives_first():
    def fn(rank, world_size):
        comm.all_reduce(torch.ones(2 + rank))

    with pytest.raises(lab.RankError, match="Detected mismatch between collectives"):
        lab.launch(fn, 2, check=True)


def test_a_collective_that_all_ranks_have_reached_or_whose_ranks_work_is_slow_and_no_deadlock():
    def status(rank, ranks, text="all_reduce", cpu_seconds=0.0):
        blocked = Blocked("all_reduce", text, communicator=Communicator(ranks))
        return RankStatus(rank, blocked, False, 1.0, 5, cpu_seconds, Counter(), Counter(), {}, {}, [])

    def stuck(*texts):
        found = {rank: status(rank, tuple(range(len(texts))), text) for rank, text in enumerate(texts)}
        return is_stuck(found, found, 1.0)

    assert not stuck("all_reduce", "all_reduce")
    assert stuck("all_reduce", "all_reduce of another shape")
    apart = {0: status(0, (0, 1)), 1: status(1, (1, 2)), 2: status(2, (0, 2))}
    assert is_stuck(apart, apart, 1.0)
    moving = apart | {1: status(1, (1, 2), cpu_seconds=0.5)}  # a large tensor
    assert not is_stuck(apart, moving, 1.0)
