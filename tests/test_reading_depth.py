"""How far a reader walks from the cell of a notebook to `torch.distributed`: calls and files, for five topics.

`python tests/test_reading_depth.py` prints the longest walk of each topic.
"""

import sys
from pathlib import Path

import pytest
import torch

import dualpipe_lab as lab

TORCH = "torch/distributed/distributed_c10d.py"
PACKAGE = str(Path(lab.__file__).parent)
MOST_CALLS, MOST_FILES = 5, 4
ENTRIES = (
    *("all_reduce", "all_to_all_single", "all_to_all", "isend", "irecv", "send", "recv", "batch_isend_irecv"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "broadcast"),
)


def walks(body):
    """Run `body` and return, for each call of torch, the library's functions between the two as (file, function)."""
    found = []

    def watch(frame, event, argument):
        if event != "call" or frame.f_code.co_name not in ENTRIES or not frame.f_code.co_filename.endswith(TORCH):
            return
        walk, frame = [], frame.f_back
        while frame is not None and frame.f_code.co_name != "the_cell":
            if frame.f_code.co_filename.startswith(PACKAGE):
                name = frame.f_code.co_filename.removeprefix(PACKAGE).lstrip("/")
                walk.append((name, frame.f_code.co_name))
            frame = frame.f_back
        found.append(walk[::-1])

    sys.setprofile(watch)
    try:
        body()
    finally:
        sys.setprofile(None)
    return found


def column_parallel(rank, world_size):
    from dualpipe_lab.tp import ColumnParallelLinear, TensorParallel

    layer = ColumnParallelLinear(8, 8, TensorParallel())
    x = torch.randn(4, 8, requires_grad=True)

    def the_cell():
        layer(x).sum().backward()

    return walks(the_cell)


def zero_2(rank, world_size):
    from dualpipe_lab.dp import Zero2

    model = torch.nn.Linear(8, 8)
    optimizer = Zero2(model)

    def the_cell():
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    return walks(the_cell)


def ring_attention(rank, world_size):
    from dualpipe_lab.cp import make_layout
    from dualpipe_lab.cp import ring_attention as attention

    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    layout = make_layout("contiguous", 4 * world_size, world_size)

    def the_cell():
        attention(q, k, v, layout).sum().backward()

    return walks(the_cell)


def moe(rank, world_size):
    from dualpipe_lab import ep

    layer = (getattr(ep, "MoE", None) or ep.SMoE)(ep.TopKRouter(8, 4, 2), ep.Experts(8, 16, 4))
    x = torch.randn(6, 8, requires_grad=True)

    def the_cell():
        layer(x).sum().backward()

    return walks(the_cell)


def dualpipe(rank, world_size):
    from dualpipe_lab import pp

    program = pp.schedules.dualpipe(world_size, 2 * world_size)
    stages = {stage: torch.nn.Linear(4, 4) for stage in range(program.num_stages)}
    runtime = pp.PipelineRuntime(program, stages, torch.nn.functional.mse_loss)
    data = [torch.randn(2, 4) for _ in range(2 * world_size)]

    def the_cell():
        runtime.step(data, data)

    return walks(the_cell)


TOPICS = (column_parallel, zero_2, ring_attention, moe, dualpipe)


def files_of(walk):
    """Files of a walk; what all topics share (messages and their bookkeeping) counts as one."""
    return {"comm" if file.startswith(("comm/", "launch/")) else file for file, _ in walk}


def longest(topic):
    found = [walk for walks_of_rank in lab.launch(topic, 2) for walk in walks_of_rank]
    assert found, f"{topic.__name__} called nothing of torch.distributed"
    return max(found, key=lambda walk: (len(walk), len(files_of(walk))))


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.__name__)
def test_torch_is_at_most_five_calls_and_four_files_away(topic):
    walk = longest(topic)
    assert len(walk) <= MOST_CALLS, walk
    assert len(files_of(walk)) <= MOST_FILES, walk


if __name__ == "__main__":
    for topic in TOPICS:
        walk = longest(topic)
        print(f"{topic.__name__:16} {len(walk)} calls, {len(files_of(walk))} files")
        print("\n".join(f"    {file}: {name}" for file, name in walk))
