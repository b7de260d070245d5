"""What a rank says when the store is gone, from the processes beside it: real ones, and no store."""

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from dualpipe_lab.world import operating_system
from dualpipe_lab.world.cluster.judge import Judge
from dualpipe_lab.world.cluster.observer import Observer
from dualpipe_lab.world.cluster.processes import Neighbours
from dualpipe_lab.world.cluster.status_store import Member
from dualpipe_lab.world.record.rank_status import Blocked, RankStatus

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="handles on processes are Linux's")
WAITS = RankStatus(
    2, Blocked("all_reduce", "all_reduce shape (8,)"), False, 9.0, 11, 0.5, Counter(), Counter(), {}, {}, []
)


@pytest.fixture
def ended(tmp_path):
    """Rank 3, which has ended beside rank 2, and its folder."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        folder = tmp_path / "rank-3"
        folder.mkdir()
        member = Member(3, 1, 1, "host1", "127.0.0.1", 1, operating_system.process_space(), process.pid, str(folder))
        neighbours = Neighbours([member], None)
        process.communicate(b"\n")
        yield neighbours, folder
        neighbours.close()


def said(neighbours):
    world = SimpleNamespace(rank=2, world_size=4, master_addr="10.99.0.1", master_port=29500)
    judge = Judge(SimpleNamespace(firsts=lambda: [0, 2]), world, neighbours, Observer(None, 0.0))
    return judge.without_store(WAITS, None)


def test_a_neighbour_that_left_because_it_lost_the_store_too_is_no_cause(ended):
    neighbours, folder = ended
    folder.rmdir()  # it goes with a rank that leaves
    error, prints = said(neighbours)
    assert type(error).__name__ == "RankTimeout"
    assert "the rendezvous at 10.99.0.1:29500 is gone" in str(error)
    assert "What rank 2 knows:\n  rank 2: waits for all_reduce shape (8,)" in str(error)
    assert prints


def test_a_neighbour_that_died_is_the_cause(ended):
    error, prints = said(ended[0])
    assert str(error).startswith("rank 3 of 4 died without an exception")
    assert "the rendezvous at 10.99.0.1:29500 is gone" in str(error)
    assert prints
