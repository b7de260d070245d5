"""All parts together: 4 ranks under DualPipe, DualPipeV and one-way rows, equal to a model of one process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_course.own.plain_model import HEADS, LR, ROUTE, leaves, make_batch, make_layers, train

TOKENS = 6
ORDERS = {  # positions, members of a group, stages, microbatches
    "dualpipe": (2, 2, 2, 6),
    "dualpipev": (2, 2, 4, 5),
    "gpipe": (2, 2, 2, 3),
    "1f1b": (2, 2, 2, 5),
    "zb_h1": (2, 2, 2, 4),
}


def rows_and_place(order, positions, num_microbatches):
    from dualpipe_ours.rows_1f1b import one_f_one_b_rows
    from dualpipe_ours.rows_dualpipe import dualpipe_place, dualpipe_rows
    from dualpipe_ours.rows_dualpipev import dualpipev_place, dualpipev_rows
    from dualpipe_ours.rows_gpipe import gpipe_place, gpipe_rows
    from dualpipe_ours.rows_zb_h1 import zb_h1_rows

    rows = {
        "dualpipe": dualpipe_rows, "dualpipev": dualpipev_rows, "gpipe": gpipe_rows, "1f1b": one_f_one_b_rows,
        "zb_h1": zb_h1_rows,
    }[order](positions, num_microbatches)  # fmt: skip
    places = {"dualpipe": dualpipe_place(positions, num_microbatches), "dualpipev": dualpipev_place(positions)}
    return rows, places.get(order, gpipe_place)


def run(rank, world_size, order, num_steps):
    """Train; return the losses, and by layer and name this rank's raw gradients of the first step and its weights."""
    from dualpipe_ours.ring import all_reduce
    from dualpipe_ours.train import Trainer

    positions, size, num_stages, num_microbatches = ORDERS[order]
    rows, place = rows_and_place(order, positions, num_microbatches)
    trainer = Trainer(make_layers(4), rows, place, num_stages, size, HEADS, ROUTE, LR)
    losses, first = [], {}
    names = {
        id(leaf): (stage * (4 // num_stages) + number, *rest)
        for stage, ws in trainer.held.items()
        for (number, *rest), leaf in leaves(ws).items()
    }
    for step in range(num_steps):
        losses.append(trainer.step(*make_batch(num_microbatches, TOKENS, step)))
        if step == 0:
            for optimizer in trainer.optimizers:
                for leaf in optimizer.parameters:
                    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
                    all_reduce(grad, optimizer.ranks)
                    first[names[id(leaf)]] = grad
    weights = {names[id(leaf)]: leaf.detach() for optimizer in trainer.optimizers for leaf in optimizer.parameters}
    return losses, first, weights


def part(name, value, member, size):
    """What a member of a group has of a weight of one process."""
    dimension = {"up": 0, "down": 1}.get(name)
    return value if dimension is None else value.chunk(size, dimension)[member]


@pytest.mark.parametrize(
    ("order", "num_steps"), [("dualpipe", 20), ("dualpipev", 3), ("gpipe", 2), ("1f1b", 2), ("zb_h1", 2)]
)
def test_it_trains_as_one_process(order, num_steps):
    positions, size, _, num_microbatches = ORDERS[order]
    found = lab.launch(run, positions * size, order, num_steps, timeout=240)
    batches = [make_batch(num_microbatches, TOKENS, step) for step in range(num_steps)]
    losses, first, weights = train(make_layers(4), batches)
    for rank, (ours, grads, parts) in enumerate(found):
        member = rank % size
        assert ours == pytest.approx(losses, rel=0, abs=1e-10)
        for theirs, own in ((first, grads), (weights, parts)):
            for (layer, name, place), value in own.items():
                place = None if place is None else place + member * 4
                wanted = part(name, theirs[layer, name, place], member, size)
                torch.testing.assert_close(value, wanted, rtol=0, atol=1e-10)
    held = {(layer, name) for _, _, parts in found for layer, name, _ in parts}
    assert held == {(layer, name) for layer, name, _ in weights}


SCRIPT = """
import sys
sys.path[:0] = {folders!r}
import dualpipe_lab as lab
from test_together import run
losses, _, _ = lab.launch(run, 4, "dualpipe", 2)[0]
sys.stdout.write(" ".join(["losses", *map(str, losses)]) + "\\n")  # one write: the ranks share the terminal
"""


def test_it_runs_under_torchrun(tmp_path):
    here = Path(__file__).parent
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folders=[str(here), str(here.parents[1])]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    losses, _, _ = train(make_layers(4), [make_batch(6, TOKENS, step) for step in range(2)])
    found = {line for line in done.stdout.splitlines() if line.startswith("losses")}
    assert len(found) == 1
    assert [float(loss) for loss in found.pop().split()[1:]] == pytest.approx(losses, rel=0, abs=1e-10)
