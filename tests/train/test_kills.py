"""Some rows of `benchmarks/kills.py` and cells of `benchmarks/resumes.py`: the suite sees what the benchmarks print."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kills
import resumes


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_a_killed_launcher_leaves_whole_checkpoints_and_no_process(tmp_path):
    """Before a rename: the ranks end by themselves, half a checkpoint is not read, two plans go on from the last."""
    (row,) = kills.rows([kills.Kill(None, "before the rename", 2)], tmp_path)
    assert row.step == 1
    assert row.is_equal, "the same plan ends with the same bits"
    assert row.distance < kills.BOUND
    assert row.left_over == []
    assert "before the rename 2" in row.going_on


@pytest.mark.parametrize(("model", "numbers"), [("llama", [3, 4]), ("v3", [2, 5])])
def test_plans_go_on_from_each_others_checkpoints(model, numbers):
    """ZeRO-3 with cp and DualPipe with dp; experts inside of dp under ZeRO-2 and DualPipe with overlapped experts."""
    every = resumes.plans(model)
    found = resumes.matrix(model, [every[number] for number in numbers])
    assert found.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert max(found.values()) < 1e-10, found
