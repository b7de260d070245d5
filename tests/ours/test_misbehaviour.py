"""A part that misbehaves on one rank gets a verdict, and leaves no process."""

import psutil
import pytest

import dualpipe_lab as lab
from dualpipe_course.own.finder import official
from dualpipe_course.registry import find

BAD = {
    "raises": ("raise ArithmeticError('lost')", "lost"),
    "exits": ("os._exit(3)", "rank 1 "),
    "prints": ("print('x' * 3_000_000); return", "rank 1 returned"),
    "waits": ("recv(x, ranks[0], tag=99)", "rank 1"),
}


@pytest.mark.parametrize("label", BAD)
@pytest.mark.on_gloo("the checks start their ranks on GLOO")
def test_a_misbehaving_answer_gets_a_verdict_and_leaves_no_process(label, capfd):
    does, says = BAD[label]
    lab.launch(lambda rank, world_size: None, 1)  # starts the fork server, which stays
    before = set(psutil.Process().children(recursive=True))
    old = "    with torch.no_grad():\n"
    text = (
        official("ring")
        .replace("irecv, isend", "irecv, isend, recv")
        .replace("import torch\n", "import os\n\nimport torch\n", 1)
    )
    assert text.count(old) == 1
    verdict = find("ranks-4").verdict(text.replace(old, f"    if get_rank() == 1:\n        {does}\n{old}"))
    assert not verdict.passed
    assert says in verdict.message
    more = set(psutil.Process().children(recursive=True)) - before
    assert psutil.wait_procs(more, timeout=10)[1] == []
