"""Ctrl-C in a cell and under torchrun: the step ends, the checkpoint is saved, the program goes on; for real.

The third case, a script, is in `test_elastic.py`.
"""

import os
import signal

from jupyter_client.manager import start_new_kernel
from training_runs import ENVIRONMENT, script, torchrun

from dualpipe_lab import train
from dualpipe_lab.dp.checkpoint import latest, saved_steps

SAYS = "interrupted: the training stops after this step"
TRAINING = """
from training_runs import LLAMA, plan, run
result = run(LLAMA, plan(dp=2, zero=1), steps=5000, folder={folder!r}, log_every=1)
said = f"ended {{result.interrupted}} {{result.metrics[-1].step}} {{result.checkpoint.name}}\\n"
print(said, end="", flush=True)  # one write: two ranks share the pipe
"""


def is_whole(folder, said):
    """One checkpoint, of the step that the program says; a text comes of it."""
    (step,) = saved_steps(folder)
    assert f"ended True {step} step-{step:08d}" in said
    assert SAYS in said
    assert train.generate(latest(folder), "A rank ", 1).startswith("A rank ")


def test_torchrun_hands_the_interrupt_on_and_all_ranks_stop_after_the_same_step(tmp_path):
    """torchrun sends SIGINT to every rank, and kills those that need more than 30 s; a terminal sends it to all too."""
    code = TRAINING.format(folder=str(tmp_path / "saved"))
    with script(tmp_path, code, *torchrun(2), begins="step 2 ") as process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said, _ = process.communicate(timeout=120)
    is_whole(tmp_path / "saved", said)
    assert said.count("ended True") == 2, said  # both ranks


def test_an_interrupted_cell_saves_and_the_next_cell_resumes(tmp_path):
    manager, client = start_new_kernel(kernel_name="python3", env=ENVIRONMENT)
    try:
        said = ran(client, TRAINING.format(folder=str(tmp_path)), manager.interrupt_kernel)
        is_whole(tmp_path, said)
        (step,) = saved_steps(tmp_path)
        more = f"steps={step + 1}, resume={str(tmp_path)!r}"
        assert f"went on to {step + 1}" in ran(
            client, f"print('went on to', run(LLAMA, plan(), {more}).metrics[-1].step)"
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def ran(client, code, interrupt=None):
    """Run a cell, interrupt it after its second step, and return what it prints."""
    said, calls = [], [interrupt]

    def hook(message):
        said.append(message["content"].get("text", "") + "\n".join(message["content"].get("traceback", [])))
        if "step 2 " in said[-1] and (call := calls.pop() if calls else None):
            call()

    client.execute_interactive(code, timeout=120, output_hook=hook)
    return "".join(said)
