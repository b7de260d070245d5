"""Any program on real ranks: gradients against one process, the virtual timeline against simulate()."""

import json
from pathlib import Path

import pytest
import torch
from runs import rounding
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.pp.schedules import build

ORACLES = json.loads((Path(__file__).parents[1] / "oracles" / "programs.json").read_text())
WIDTH, ROWS = 4, 3


def make_stages(number, seed=0):
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(number)]


def make_batch(number, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(number)] for _ in range(2)
    ]


def reference(num_stages, num_microbatches, order=None, weights=None):
    """Gradients and loss of plain gradient accumulation over the same microbatches."""
    model = nn.Sequential(*make_stages(num_stages))
    inputs, targets = make_batch(num_microbatches)
    loss = 0.0
    for m in order or range(num_microbatches):
        weight = weights[m] if weights else 1 / num_microbatches
        part = nn.functional.mse_loss(model(inputs[m]), targets[m]) * weight
        part.backward()
        loss += part.item()
    return [[p.grad for p in stage.parameters()] for stage in model], loss


def run(program, weights=None, cost=None, **options):
    """Per rank: gradients by stage, losses, peak; and the launch's results."""
    stages, batch = make_stages(program.num_stages), make_batch(program.num_microbatches)

    def fn(rank, world_size):
        torch.manual_seed(100 + rank)  # a missing copy of the weights would show
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        runtime = PipelineRuntime(
            program, mine, nn.functional.mse_loss, torch.empty(ROWS, WIDTH, dtype=torch.float64), cost=cost
        )
        result = runtime.step(*batch, weights)
        grads = {index: [p.grad for p in module.parameters()] for index, module in mine.items()}
        return grads, {m: loss.item() for m, loss in result.losses.items()}, result.peak_activations

    return lab.launch(fn, program.num_ranks, **options)


def summed(out, num_stages):
    """Gradients by stage; the halves of a stage on two ranks are summed."""
    total = [None] * num_stages
    for grads, _, _ in out:
        for stage, parts in grads.items():
            total[stage] = parts if total[stage] is None else [a + b for a, b in zip(total[stage], parts, strict=True)]
    return total


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (1, 3), (2, 1), (2, 5), (4, 3), (4, 8)])
def test_gradients_equal_accumulation_bitwise(name, num_ranks, num_microbatches):
    out = run(build(name, num_ranks, num_microbatches))
    expected, loss = reference(num_ranks, num_microbatches)
    for ours, theirs in zip(summed(out, num_ranks), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert sum(out[-1][1].values()) == pytest.approx(loss, rel=rounding(torch.float64, num_microbatches))
    peaks = [num_microbatches if name == "gpipe" else min(num_ranks - r, num_microbatches) for r in range(num_ranks)]
    assert [peak for _, _, peak in out] == peaks


@pytest.mark.parametrize("name", [name for name in ORACLES if name != "legend"])
def test_split_overlapped_bidirectional_and_v_shaped_programs_match_too(name):
    program = Program.parse(name, ORACLES[name])
    cost = Cost(F=3_000_000, I=3_000_000, W=2_000_000, overlap=7_000_000, latency=500_000, transfer=96_000)
    link = lab.Link(gbps=0.008, latency_ms=0.5)  # 96 bytes take 96 us
    out = run(program, cost=cost, clock="virtual", link=link)
    expected, _ = reference(program.num_stages, program.num_microbatches)
    for ours, theirs in zip(summed(out, program.num_stages), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() <= 1e-12 * max(1, b.abs().max())
    assert out.timeline == lab.simulate(program, cost, unit="ns")
    assert [peak for *_, peak in out] == [out.timeline.peak_activations(rank) for rank in range(program.num_ranks)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("link", [None, lab.Link(gbps=0.001, latency_ms=1)])
def test_the_virtual_timeline_equals_the_simulation(name, link):
    transfer, latency = (link.transfer_ns(ROWS * WIDTH * 8), link.latency_ns) if link else (0, 0)
    cost = Cost(F=[1_000_000, 2_000_000, 3_000_000], I=2_000_000, W=1_500_000, latency=latency, transfer=transfer)
    program = build(name, 3, 5)
    out = run(program, cost=cost, clock="virtual", link=link)
    assert out.timeline == lab.simulate(program, cost, unit="ns")
    assert out.timeline.makespan > 0


def test_lowered_programs_run_alike():
    program = build("1f1b", 2, 3)
    assert summed(run(lab.lower(program)), 2)[0][0].equal(summed(run(program), 2)[0][0])


def test_messages_and_bytes_equal_the_closed_form():
    num_ranks, num_microbatches = 4, 5
    ledger = run(build("gpipe", num_ranks, num_microbatches)).ledger
    boundary = ROWS * WIDTH * 8
    for rank in range(num_ranks):
        neighbours = (rank > 0) + (rank < num_ranks - 1)
        assert ledger.count("isend", rank) == ledger.count("irecv", rank) == neighbours * num_microbatches
        assert ledger.sent("isend", rank) == neighbours * num_microbatches * boundary


def test_unequal_microbatches_weigh_by_their_share():
    weights = [0.5, 0.25, 0.25]
    expected, _ = reference(2, 3, weights=weights)
    ours = summed(run(build("1f1b", 2, 3), weights), 2)
    for mine, theirs in zip(ours, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_sends_carry_what_the_stage_made_and_nothing_else():
    """A zero message would still give a timeline, a ledger and a loss: look at the gradient of the first stage."""
    grads = summed(run(build("gpipe", 3, 2)), 3)
    assert all(grad.abs().max() > 0 for stage in grads for grad in stage)


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
        boundary = change.get("boundary", torch.empty(ROWS, WIDTH, dtype=torch.float64))
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
