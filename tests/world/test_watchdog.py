"""The watchdog under torchrun's agents: each failure that `launch` explains, in its words and within twice its time."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torchrun_cases import kinds

import dualpipe_lab as lab
from dualpipe_lab.world.folder import PREFIX
from dualpipe_lab.world.supervise.supervisor import PROBE_SECONDS

SLACK = 8.0  # seconds beside twice those of `launch`, which starts its ranks in a tenth of one, on a busy machine


def launched(kind, timeout):
    """The error of the same function under `launch`, and its seconds."""
    started = time.perf_counter()
    with pytest.raises((lab.RankError, lab.RankTimeout)) as caught:
        lab.launch(getattr(kinds, kind), 3, timeout=timeout)
    return str(caught.value), time.perf_counter() - started


def said(text, name):
    """The lines of an error up to the ranks' own words, without seconds."""
    first, *lines = text.partition(f"{name}: ")[2].splitlines()
    indented = itertools.takewhile(lambda line: line.startswith("  "), lines)
    return [re.sub(r"\d+\.\d s", "# s", line) for line in (first, *indented)]


def assert_nothing_left(agents):
    deadline = time.monotonic() + 20
    while (left := agents.ranks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


FAILURES = {  # the first lines of the error
    "raises": ["rank 1 of 3 raised ValueError: bad shape", 'in raises:  raise ValueError("bad shape")'],
    "leaves": ["rank 1 of 3 left with sys.exit(4)", "in leaves:  sys.exit(4)"],
    "exits": ["rank 1 of 3 died without an exception (exit code 3)"],
    "is_killed": ["rank 1 of 3 died without an exception (SIGKILL)"],
    "is_terminated": ["rank 1 of 3 died without an exception (SIGTERM)"],
    "segfaults": ["rank 1 of 3 died without an exception (SIGSEGV)", "in segfaults"],
    "sends_too_much": ["(SIGABRT): rank 0 called recv from rank 1 tag 0 shape (3,)", "in sends_too_much"],
}


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", FAILURES)
def test_a_rank_that_fails_is_explained_in_the_words_of_launch(kind, agents):
    reference, seconds = launched(kind, 60)
    outcome = agents.run(kind)
    assert outcome.codes == [1]
    lines = said(outcome.text, "RankError")
    expected = FAILURES[kind]
    for line, other, part in zip(lines, reference.splitlines(), expected, strict=False):
        assert part in line
        assert line == other
    assert outcome.seconds[0] < 2 * seconds + SLACK
    assert_nothing_left(agents)


HANGS = {  # time limit, and the cause in the error
    "never_joins": (60, "all_reduce: rank 2 never joined"),
    "mixes_order": (60, "collective mismatch: rank 0 in all_reduce, ranks 1, 2 in all_to_all_single"),
    "waits_in_a_ring": (60, "deadlock: rank 0 -> rank 2 -> rank 1 -> rank 0 (each waits for the next)"),
    "mistakes_a_tag": (60, "tag mismatch? rank 1 waits for tag 3 from rank 0, whose unreceived sends to it have tag 2"),
    "never_ends": (2, "barrier: rank 1 never joined"),
    "holds_the_interpreter": (
        2,
        "rank 1: holds the interpreter's lock, so it cannot answer; at kinds.py, line",
    ),
    "is_stopped": (2, "rank 1: was stopped by a signal (SIGSTOP), so it cannot answer"),
}


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", HANGS)
def test_ranks_that_hang_are_explained_in_the_words_of_launch(kind, agents):
    limit, cause = HANGS[kind]
    reference, seconds = launched(kind, limit)
    outcome = agents.run(kind, timeout=float(limit))
    assert outcome.codes == [1]
    lines = said(outcome.text, "RankTimeout")
    assert any(cause in line for line in lines), lines
    assert lines[0].startswith("no progress; gave up after" if limit == 60 else f"the time limit of {limit} s passed")
    if kind not in ("is_stopped", "holds_the_interpreter"):  # launch cannot tell; the signal for the stack ends a sleep
        assert lines == [re.sub(r"\d+\.\d s", "# s", line) for line in reference.splitlines()]
    assert outcome.seconds[0] < 2 * seconds + SLACK
    assert_nothing_left(agents)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["computes_on", "holds_it_for_a_while", "forks"])
def test_a_rank_that_takes_its_time_is_no_failure(kind, agents):
    outcome = agents.run(kind)
    assert outcome.codes == [0], outcome.text
    assert outcome.values() == {str(rank): "['fine', 'fine', 'fine']" for rank in range(3)}


@pytest.mark.slow
def test_folders_of_dead_and_living_ranks_are_removed(agents):
    agents.run("is_killed")
    agents.run("waits_in_a_ring")
    left = [path for path in agents.folder.glob(f"{PREFIX}*") if is_abandoned(path)]
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["is_killed_with_a_folder", "waits_with_a_folder"])
def test_private_folders_of_ranks_that_cannot_unwind_are_removed(kind, agents):
    """By the rank itself where it only waits, and by its neighbours where it is dead."""
    before = set(agents.folder.glob(f"{PREFIX}*"))
    agents.run(kind)
    assert set(agents.folder.glob(f"{PREFIX}*")) - before == set()


@pytest.mark.slow
def test_what_a_power_cut_left_is_removed_by_the_next_start(agents):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    left, living = (agents.folder / f"{PREFIX}{pid}-left" for pid in (ended.pid, os.getpid()))
    for path in (left, living):
        path.mkdir()
        (path / "lock").touch()
    agents.run("fine")
    assert (left.exists(), living.exists()) == (False, True)
    shutil.rmtree(living)


def is_abandoned(path):
    owner = path.name.removeprefix(PREFIX).partition("-")[0]
    return (path / "operations").exists() and not Path(f"/proc/{owner}").exists()


@pytest.mark.slow
def test_a_node_that_vanishes_is_named_with_its_ranks(agents, two_hosts):
    """Its link goes down and its processes are gone: no connection is closed, so GLOO would wait for 30 minutes."""
    agents.begin("trains", hosts=two_hosts, ranks_per_host=2)
    agents.wait_for("STEPPING")
    gone = time.time()
    two_hosts[1].kill()
    outcome = agents.end()
    began = max(float(when) for when in re.findall(r"^BEGAN \d+ ([\d.]+)$", outcome.text, re.MULTILINE))
    assert outcome.codes == [1, -9]
    text = outcome.texts[0]
    lost = r"RankError: rank 2 of 4 was lost with node 1 \(host \S+, ranks 2, 3\): no heartbeat for ([\d.]+) s"
    silence = float(re.search(lost, text)[1])
    assert 1.5 * PROBE_SECONDS < silence < began + outcome.seconds[0] - gone + 2 * PROBE_SECONDS
    assert f"nothing answers at {two_hosts[1].address}" in text
    assert re.search(r"rank 0: waits for all_reduce shape \(1000,\).*at kinds.py, line \d+, in trains", text)
    assert began + outcome.seconds[0] - gone < 6 + SLACK  # the ranks' end: their agent ends when torch lets it
    assert_nothing_left(agents)


@pytest.mark.slow
def test_the_end_of_the_rendezvous_host_is_told_on_the_other(agents, two_hosts):
    agents.begin("trains", hosts=two_hosts, ranks_per_host=2)
    agents.wait_for("STEPPING")
    gone = time.monotonic()
    two_hosts[0].kill()
    while (
        len(two_hosts[1].pids()) > 1 and time.monotonic() - gone < 20 + SLACK
    ):  # its agent waits for torch's own reasons
        time.sleep(0.1)
    seconds = time.monotonic() - gone
    two_hosts[1].kill()
    outcome = agents.end()
    assert re.search(rf"the rendezvous at {two_hosts[0].address}:\d+ is gone", outcome.texts[1])
    assert "What rank 2 knows:" in outcome.texts[1]
    assert "rank 2: waits for all_reduce" in outcome.texts[1]
    assert seconds < 20 + SLACK
    assert_nothing_left(agents)


@pytest.mark.slow
def test_the_death_of_an_agent_ends_its_ranks_and_the_others(agents, two_hosts):
    agents.begin("trains", hosts=two_hosts, ranks_per_host=2)
    agents.wait_for("STEPPING")
    pids = two_hosts[1].pids()
    os.kill(min(pids), signal.SIGKILL)  # the agent is older than its ranks
    outcome = agents.end()
    assert outcome.codes == [1, -9]
    assert re.search(r"rank 2 of 4 cannot go on: its agent \(torchrun\) has ended, on host", outcome.texts[0])
    assert_nothing_left(agents)


@pytest.mark.slow
def test_ranks_of_two_hosts_meet_again_after_one_was_killed(agents, two_hosts):
    outcome = agents.run("comes_back", hosts=two_hosts, ranks_per_host=2, restarts=1)
    assert outcome.codes == [0, 0], outcome.text
    assert outcome.values() == {str(rank): "[16.0, 16.0, 16.0, 16.0]" for rank in range(4)}
    for text in outcome.texts:
        assert "RankError: rank 3 of 4 died without an exception (SIGKILL)" in text
    assert_nothing_left(agents)


@pytest.mark.slow
def test_a_failure_is_told_on_every_host(agents, two_hosts):
    outcome = agents.run("is_killed", hosts=two_hosts, ranks_per_host=2)
    for text in outcome.texts:
        assert "RankError: rank 1 of 4 died without an exception (SIGKILL)" in text
    assert_nothing_left(agents)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moves_slowly", "holds_it_for_a_while"])
def test_a_slow_link_and_a_lonely_rank_that_cannot_beat_are_no_failures(kind, agents, two_hosts):
    """4 MB at 10 Mbit/s take over three seconds; a node whose only rank holds the interpreter's lock is not gone."""
    for host in two_hosts:
        host.slow_down("10mbit")
    outcome = agents.run(kind, hosts=two_hosts, ranks_per_host=1)
    assert outcome.codes == [0, 0], outcome.text
    assert max(outcome.seconds) > 3
    assert outcome.values() == {"0": "['fine', 'fine']", "1": "['fine', 'fine']"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raises", "waits_in_a_ring"])
def test_the_same_under_torchrun_itself(kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"from torchrun_cases import kinds\nkinds.main({kind!r}, 60.0)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    expected = FAILURES[kind][0] if kind in FAILURES else HANGS[kind][1]
    assert expected in done.stderr
