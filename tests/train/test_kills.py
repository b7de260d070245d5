"""A row of `benchmarks/kills.py`: the suite sees what the benchmark prints."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kills


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_a_killed_launcher_leaves_whole_checkpoints_and_no_process(tmp_path):
    """Before a rename: the ranks end by themselves, half a checkpoint is not read, two plans go on from the last."""
    (row,) = kills.rows([kills.Kill(None, "before the rename", 2)], tmp_path)
    assert row.step == 1
    assert row.is_equal, "the same plan ends with the same bits"
    assert row.distance < kills.BOUND
    assert row.left_over == []
    assert "before the rename 2" in row.going_on
