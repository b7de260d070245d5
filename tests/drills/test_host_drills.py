"""Trainings on two hosts that are hit: eight of `host_drills`, a partition, two jobs at once, and a smaller world.

A try takes 10 to 25 s, most of them waiting: half of that is a new start, and the end of a rendezvous is told after 10.
"""

import re
import time
from pathlib import Path

import pytest
from host_drills import BOUND, PHASES, VICTIMS, Case, Row, blow_of, drawn, drilled, end_of, wait_until
from host_site import PATIENCE, STEPS, Site, distance, losses

from dualpipe_lab.dp.checkpoint import latest, saved_steps
from dualpipe_lab.train.result import read_weights

pytestmark = pytest.mark.slow
SEED = 23
NUMBER = 9  # odd: while ranks still join, limits of up to a minute count, which the script has
PAUSE = 0.3  # seconds before each step, in which something else happens


@pytest.fixture(scope="module")
def site(need_hosts, tmp_path_factory):
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.close()


def assert_undisturbed(site, job, bound=0.0):
    """The last weights, and each loss, are those of the training that nobody disturbed."""
    assert distance(read_weights(latest(job["folder"])), site.weights[STEPS]) <= bound
    assert losses(job["folder"]) == pytest.approx(site.losses, rel=bound, abs=0.0)


def wait_for_step(job, step, rank=0):
    """Wait until a rank has begun a step."""
    notes = Path(job["notes"], f"0-0-{rank}")
    assert wait_until(lambda: notes.exists() and f" step {step} " in notes.read_text(), PATIENCE)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", VICTIMS)
def test_whatever_is_killed_is_explained_and_goes_on_with_equal_weights(victim, phase, site):
    row = drilled(site, drawn(victim, phase, NUMBER, SEED))
    assert row.is_right, row
    assert max((seconds for _, seconds, _ in row.explained), default=0.0) < 60


def test_a_partition_is_explained_on_both_sides_and_nothing_contradicts(site):
    """Both hosts live and see one folder; no connection is closed, and no packet arrives."""
    job = site.job("partition", {"phase": "never", "count": 0, "rank": -1}, pause=PAUSE)
    site.agents.begin("training", hosts=site.hosts[:2], ranks_per_host=2, job=job)
    wait_for_step(job, 3)
    site.hosts[1].cut()
    cut = time.time()
    causes = (r"rank 2 of 4 was lost with node 1 \(host", r"the rendezvous at \S+ is gone")
    outputs = [Path(output) for output in site.agents.case["outputs"]]
    for output, cause in zip(outputs, causes, strict=True):
        assert wait_until(lambda output=output, cause=cause: re.search(cause, output.read_text()), PATIENCE)
    assert time.time() - cut < 60
    row = Row(None)
    end_of(site, [0, 1], cut, row)
    assert row.left_over == []
    saved = saved_steps(job["folder"])
    assert saved[-1] in (2, 3)
    assert site.broken(job["folder"]) == []
    site.hosts[1].join()
    assert site.resume(job, site.hosts[:2]).codes == [0, 0]
    assert_undisturbed(site, job)
    assert site.left_over(site.hosts[:2]) == []


def test_two_jobs_on_the_same_hosts_do_not_meet(site, tmp_path):
    """One loses a rank, and the other ends with the weights that it has alone; their weights differ."""
    other = Site(tmp_path / "other", first_port=29_700, made=site.hosts, options={"seed": 7})
    try:
        assert distance(other.weights[STEPS], site.weights[STEPS]) > 0.01
        lively = other.job("lively", {"phase": "never", "count": 0, "rank": -1}, pause=PAUSE)
        other.agents.begin("training", hosts=site.hosts[:2], ranks_per_host=2, job=lively)
        wait_for_step(lively, 1)
        case = Case("rank", "step", 0, 3, 3, 0.5, "both hosts")
        hit = site.begin(case, "hit")
        blow_of(hit)
        outcome = site.agents.end()
        assert outcome.codes == [1, 1]
        for text in outcome.texts:
            assert "rank 3 of 4 died without an exception (SIGKILL)" in text
        assert other.agents.end().codes == [0, 0]
        assert_undisturbed(other, lively)
        assert site.resume(hit, site.hosts[:2]).codes == [0, 0]
        assert_undisturbed(site, hit)
    finally:
        other.close()


def test_torchrun_goes_on_with_the_host_that_is_left(site):
    """`--nnodes 1:2 --max-restarts 1`: the next start has two ranks, another plan, and the same curve."""
    case = Case("host", "step", 0, 3, 4, 0.5, "restart")
    rendezvous = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 2}
    job = site.begin(case, "elastic", least=1, rendezvous=rendezvous)
    blow_of(job)
    outcome = site.agents.end()
    site.hosts[1].join()
    assert outcome.codes == [0, -9], outcome.texts[0]
    assert re.search(r"rank 2 of 4 was lost with node 1 \(host", outcome.texts[0])
    assert "2 ranks have come instead of 4" in outcome.texts[0]
    assert_undisturbed(site, job, BOUND)
    assert site.left_over(site.hosts[:1]) == []
