"""A training that is stopped, killed or started with other numbers of ranks goes on with the curve of one process."""

import json
import re
import signal
import socket
import time

import psutil
import pytest
from training_runs import ENVIRONMENT, LLAMA, OPTIONS, TEXT, V3, plan, run, script, sums_of, torchrun

import dualpipe_lab as lab
from dualpipe_lab import train
from dualpipe_lab.dp.checkpoint import latest, saved_steps
from dualpipe_lab.launch.cluster.environment import Environment
from dualpipe_lab.train.run import check_agreement, plan_for_world

SCRIPT = """
import sys
from training_runs import LLAMA, plan, run, say

options = {"steps": int(sys.argv[1]), "folder": sys.argv[2], "save_every": 2, "elastic": True, "log_every": 1}
result = run(LLAMA, plan(dp=2, zero=1, num_microbatches=2), weights=True, **options)
say(result)
sys.exit(result.exit_code)
"""


def alone():
    """What torchrun tells the only rank of a world."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    where = {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return numbers | where | {"TORCHELASTIC_RESTART_COUNT": "0"}


def is_the_curve(said, first, steps, config=LLAMA):
    """The rows after step `first`, and the weights, are those of one process that never ended."""
    rows, sums = json.loads(re.search(r"^rows (.*)$", said, re.MULTILINE)[1])
    expected = train.reference(config, TEXT, steps, **OPTIONS)
    assert [row[0] for row in rows] == list(range(first + 1, steps + 1))
    for (_, loss, norm), right in zip(rows, expected.metrics[first:], strict=True):
        assert (loss, norm) == pytest.approx((right.loss, right.norm), rel=1e-10)
    assert sums == pytest.approx(sums_of(expected.weights()), rel=1e-8)


def test_a_node_that_is_taken_away_saves_and_fewer_ranks_go_on(tmp_path):
    """torchrun hands SIGTERM on to its ranks; one of two comes back."""
    saved = tmp_path / "saved"
    with script(tmp_path, SCRIPT, *torchrun(2, 5000, saved), begins="step 3 ") as process:
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "interrupted by SIGTERM: the training stops after this step" in said
    step = saved_steps(saved)[-1]
    assert step >= 3
    with script(tmp_path, SCRIPT, "script.py", step + 2, saved, **alone()) as process:
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert "1 rank has come instead of 2: dp 1 = 1 rank, m 2" in said
    is_the_curve(said, step, step + 2)
    again = run(LLAMA, plan(dp=2, zero=1), steps=step + 2, folder=saved, elastic=True)
    assert again.metrics == []  # there is nothing left to do
    assert again.checkpoint == latest(saved)


def test_a_node_that_is_taken_away_while_its_ranks_wait_for_others_is_left_at_once(tmp_path):
    """There is nothing to save, and torchrun starts no rank again before all of a node have ended."""
    code = """
from training_runs import LLAMA, plan, run
print("begun", flush=True)
run(LLAMA, plan(dp=2), folder="saved")
"""
    started = alone() | {"WORLD_SIZE": "2"}
    with script(tmp_path, code, **started) as process:
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(started["MASTER_PORT"]))).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        time.sleep(1.0)  # it waits in the store that it has opened
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 60  # CONNECT_SECONDS are 120


def test_experts_on_two_hosts_go_on_with_one_of_them(tmp_path):
    """DualPipe x ep with ZeRO-1 on 2 x 2 ranks; host 1 dies in step 4; two ranks end on the curve of one process."""
    code = """
import sys, time
import dualpipe_lab as lab
from dualpipe_lab.train.trainer import Trainer
from training_runs import V3, plan, run, say

step, started = Trainer.step, lab.cluster()

def stepped(trainer, batch):
    if started.restart == 0 and trainer.num_steps == 3:
        time.sleep(120 * (started.node == 1))  # until it dies
    return step(trainer, batch)

Trainer.step = stepped
chosen = plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipe", zero=1)
options = {"folder": sys.argv[1], "traces": sys.argv[2], "trace_every": 1, "save_every": 1, "log_every": 1}
say(run(V3, chosen, elastic=True, weights=True, **options))
"""
    (tmp_path / "script.py").write_text(code)
    saved, traces = tmp_path / "saved", tmp_path / "traces"
    with pytest.MonkeyPatch.context() as patch, lab.emulated_hosts(2) as hosts:
        patch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
        hosts.start(tmp_path / "script.py", saved, traces, min_hosts=1, max_restarts=1)
        hosts.wait_for("^step 3 ", seconds=240)
        while saved_steps(saved)[-1:] != [3]:  # it is saved after it is printed
            time.sleep(0.05)
        hosts.kill(1)
        ended = hosts.end()
    assert ended.codes == [0, -9], ended.outputs[0]
    assert re.search(r"^rank [01]: last operation: .* and did not end$", ended.outputs[0], re.MULTILINE)
    is_the_curve(ended.outputs[0], 3, 5, V3)
    both = [lab.read_traces(traces / name) for name in ("run-0000", "run-0001")]
    assert [(len(found.by_rank), found.steps[-1]) for found in both] == [(4, 3), (2, 5)]
    assert all(m.arrived >= m.sent for found in both for m in found.timeline(found.steps[-1:]).messages)


STOPPED = """
import sys
from training_runs import LLAMA, plan, run
if __name__ == "__main__":
    result = run(LLAMA, plan(dp=2), steps=5000, folder="saved", save_every=1, keep=2, log_every=1, sequence_length={})
    print("ended", result.metrics[-1].step, result.checkpoint)
    sys.exit(result.exit_code)
"""


def test_a_second_signal_stops_at_once(tmp_path):
    """The step takes seconds; nothing is saved, and no rank stays."""
    code = STOPPED.format(2048).replace("save_every=1, keep=2, ", "")
    with script(tmp_path, code, begins="step 1 ") as process:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=120)
    assert "interrupted by SIGTERM" in said
    assert process.returncode == 128 + signal.SIGTERM
    assert saved_steps(tmp_path / "saved") == []
    assert psutil.wait_procs(children, timeout=60)[1] == []


@pytest.mark.parametrize(("name", "says"), [("SIGINT", "interrupted"), ("SIGUSR1", "interrupted by SIGUSR1")])
def test_a_script_that_is_stopped_ends_its_step_saves_and_says_so(tmp_path, name, says):
    """By Ctrl-C, or by a time limit that comes near; only the last two checkpoints are kept."""
    if not hasattr(signal, name):
        pytest.skip(f"there is no {name}")
    with script(tmp_path, STOPPED.format(16), begins="step 2 ") as process:
        process.send_signal(getattr(signal, name))
        said, _ = process.communicate(timeout=120)
    assert process.returncode == train.Result("", [], interrupted=True).exit_code == 75
    assert f"{says}: the training stops after this step; interrupt again to stop at once" in said
    *_, step = steps = saved_steps(tmp_path / "saved")
    assert len(steps) == 2
    assert f"ended {step} saved/step-{step:08d}" in said


@pytest.mark.parametrize("config", [LLAMA, V3], ids=["llama", "v3"])
@pytest.mark.parametrize("global_batch", [6, 8])
def test_worlds_of_other_sizes_have_a_plan(config, global_batch):
    """The sequences of a step divide among data ranks and microbatches, and the plan is legal."""
    whole = plan(pp=2, dp=2, tp=2, num_microbatches=global_batch // 4, zero=1)
    options = train.TrainOptions(**OPTIONS | {"global_batch": global_batch})
    for num_ranks in range(1, 9):
        chosen = plan_for_world(whole, config, options, Environment(0, num_ranks, 0, num_ranks, 0, 1, "here", 1))
        assert chosen.world_size == num_ranks
        assert global_batch % (chosen.data_size * chosen.num_microbatches) == 0
        chosen.check(config, OPTIONS["sequence_length"])
        assert chosen == whole if num_ranks == 8 else chosen.precision == whole.precision


def test_a_world_of_another_size_divides_every_batch_of_a_growing_one():
    options = train.TrainOptions(**OPTIONS | {"global_batch": 24, "batch_growth": [(3, 32)]})
    chosen = plan_for_world(plan(dp=8), LLAMA, options, Environment(0, 3, 0, 3, 0, 1, "here", 1))
    assert [size % (chosen.data_size * chosen.num_microbatches) for size in (24, 32)] == [0, 0]


def test_ranks_that_see_different_folders_are_told(tmp_path):
    def fn(rank, world_size):
        try:
            check_agreement(tmp_path / "step-00000004" if rank == 0 else None)
        except ValueError as error:
            return str(error)
        return None

    for said in lab.launch(fn, 2, output="collect"):
        assert "rank 0 on" in said
        assert "step-00000004, rank 1 on" in said
        assert said.endswith("from none; give a folder that every host shares")
