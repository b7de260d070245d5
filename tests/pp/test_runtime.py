"""What one pipeline refuses, and what passes: lowered programs, unequal stages, frozen weights, integer inputs."""

import pytest
import torch
from rank_runs import BYTES, LIKE, WIDTH, bitwise, expected_grads, make_batch, make_stages, run_all
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.pp.schedules import build


@pytest.mark.parametrize("link", [None, lab.Link(gbps=0.001, latency_ms=1)])
def test_unequal_stages_on_the_virtual_clock_and_lowered_programs(link):
    transfer, latency = (link.transfer_ns(BYTES), link.latency_ns) if link else (0, 0)
    cost = Cost(F=[1_000_000, 2_000_000, 3_000_000], I=2_000_000, W=1_500_000, latency=latency, transfer=transfer)
    programs = [build("gpipe", 3, 5), build("1f1b", 3, 5), lab.lower(build("1f1b", 3, 5))]
    out, results = run_all(programs, 3, cost=cost, clock="virtual", link=link)
    began = [ranks[0][-1] for ranks in results]
    for program, ranks, start, end in zip(programs, results, began, [*began[1:], 10**18], strict=True):
        assert out.timeline.between(start, end).steps() == [lab.simulate(program, cost, unit="ns")]
        expected, _ = expected_grads(program, make_batch(5))
        assert all(bitwise(ranks[rank][0][rank], expected[rank][rank]) for rank in range(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": [0, 1]}, r"GPipe places stages \[0\] on rank 0, got modules for \[0, 1\]"),
        ({"inputs": 3}, "GPipe needs 2 inputs, one per microbatch, got 3"),
        ({"boundary": torch.empty(1)}, r"stage 0 made \(3, 4\) of torch.float64 .* the boundary says \(1,\)"),
        ({"world_size": 3}, "GPipe is written for 2 ranks, the group has 3"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    program, stages = build("gpipe", 2, 2), make_stages(2)
    inputs, targets = make_batch(change.get("inputs", 2))

    def fn(rank, world_size):
        mine = {index: stages[index] for index in (change.get("stages", [rank]) if rank == 0 else [rank])}
        boundary = change.get("boundary", LIKE)
        PipelineRuntime(program, mine, nn.functional.mse_loss, boundary).step(inputs, targets)

    with pytest.raises(lab.RankError, match=message):
        lab.launch(fn, change.get("world_size", 2))


def test_frozen_parameters_and_integer_inputs_pass():
    embedding, head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7)
    head.bias.requires_grad_(False)
    program = Program.parse("split", ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"])
    tokens = [torch.tensor([1, 2, 2]), torch.tensor([0, 6, 1])]

    def fn(rank, world_size):
        stage = embedding if rank == 0 else head
        runtime = PipelineRuntime(program, {rank: stage}, nn.functional.cross_entropy, torch.empty(3, WIDTH))
        runtime.step(tokens, tokens)
        return [p.grad for p in stage.parameters()]

    (rows,), (weight, bias) = lab.launch(fn, 2)
    model = nn.Sequential(embedding, head)
    for x in tokens:
        (nn.functional.cross_entropy(model(x), x) / 2).backward()
    assert torch.allclose(rows, embedding.weight.grad)
    assert torch.allclose(weight, head.weight.grad)
    assert bias is None
