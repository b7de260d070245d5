"""Weights that several ranks hold: mirrors of a stage, and one weight in two stages."""

import pytest
import torch
from rank_runs import LIKE, WIDTH, bitwise, close, expected_grads, grads_of, make_batch, make_stages
from torch import nn
from torch.nn import functional

import dualpipe_lab as lab
from dualpipe_lab import dp
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.pp.schedules import build


def device(rank, world_size):
    """The kind of device of a rank: that of NCCL, or of its stand-in, is "cuda"."""
    return lab.device().type


@pytest.mark.parametrize("name", ["dualpipe", "easy_dualpipe"])
def test_mirrors_are_summed_during_or_after_the_step(name):
    program = build(name, 4, 8)
    batch = make_batch(8)
    stages = make_stages(4)
    stages[2][0].bias.requires_grad_(False)

    def fn(rank, world_size):
        results = []
        for automatic in (None, False):
            mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
            for module in mine.values():
                module.zero_grad()
            runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, LIKE, sum_copies=automatic)
            runtime.step(*batch)
            for _ in range(2):  # whoever asks again gets the same sum
                runtime.sum_copies()
            results.append({stage: [g if g is None else g.clone() for g in grads_of(mine[stage])] for stage in mine})
        return results

    out = lab.launch(fn, 4)
    expected, _ = expected_grads(program, batch)
    for rank, results in enumerate(out):
        for grads in results:
            for stage, ours in grads.items():
                low, high = sorted((stage, 3 - stage))
                theirs = [a + b for a, b in zip(expected[low][stage], expected[high][stage], strict=True)]
                if stage == 2:
                    assert ours.pop() is None
                    theirs.pop()
                assert bitwise(ours, theirs), (rank, stage)
    sent = sum(p.numel() for stage in stages for p in stage.parameters() if p.requires_grad) * 8
    assert out.ledger.sent("isend") == 2 * 2 * 3 * 8 * LIKE.nbytes
    connecting = 2 * 2 * 3 * 4 * (lab.launch(device, 1)[0] == "cuda")  # there each runtime first connects its group
    assert out.ledger.sent("all_reduce") == 2 * 2 * sent + connecting  # twice: each copy once


class Holder(nn.Module):
    """The stages of a rank, drawn there without a seed: copies of a stage or of a tied weight start unlike."""

    def __init__(self, numbers, last=None):
        super().__init__()
        self.stages = {number: nn.Linear(4, 4).double() for number in numbers}
        self.parts = nn.ModuleDict({str(number): stage for number, stage in self.stages.items()})
        self.tied = {0: "weight", last: "weight"} if last else {}


def numbers_of(program, rank):
    """The stages of a rank, in another order on every other one."""
    return sorted({*program.stages_of(rank)}, reverse=bool(rank % 2))


@pytest.mark.parametrize("manual", [False, True])
def test_copies_of_a_stage_that_start_with_different_weights_are_refused(manual):
    program = build("dualpipe", 2, 4)
    batch = [torch.ones(2, 4, dtype=torch.float64)] * 4

    def fn(rank, world_size):
        runtime = PipelineRuntime(
            program, Holder(numbers_of(program, rank)).stages, nn.functional.mse_loss, sum_copies=not manual
        )
        runtime.step(batch, batch)
        runtime.sum_copies()

    words = r"ranks \d and \d of the pipeline hold stage 0 with different weights.*the Mesh and the program"
    with pytest.raises(lab.RankError, match=words):
        lab.launch(fn, 2, output="collect")


@pytest.mark.parametrize("stage", ["DDP", "Zero1", "Zero3"])
@pytest.mark.parametrize("name", ["dualpipe", "zbv", "1f1b"])
def test_an_optimizer_of_a_mesh_makes_mirrors_and_tied_stages_equal(name, stage):
    """On 2 data ranks; the gradients are those of one process with the weights of the first holder."""
    program = build(name, 2, 4)
    last = program.num_stages - 1
    data = torch.randn(2, 4, 2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("dp", 2), ("pp", 2)]))
        holder = Holder(numbers_of(program, mesh.rank("pp")), last)
        units = {"units": list(holder.stages.values())} if stage == "Zero3" else {}
        optimizer = getattr(dp, stage)(holder, mesh, program=program, reduce="sum", **units)
        weights = dp.full_weights(optimizer)
        runtime = PipelineRuntime(
            program, holder.stages, nn.functional.mse_loss, group=mesh.group("pp"), sum_copies=True
        )
        batch = list(data[mesh.rank("dp")])
        runtime.step(batch, batch)
        return weights, dp.full_gradients(optimizer)

    out = lab.launch(fn, 4, output="collect")
    model = Holder(range(last + 1))
    state = {name: weight for weights, _ in out for name, weight in weights.items()}
    model.load_state_dict(state)
    assert torch.equal(state["parts.0.weight"], state[f"parts.{last}.weight"])
    model.stages[last].weight = model.stages[0].weight
    for x in data.flatten(0, 1):
        (functional.mse_loss(nn.Sequential(*model.stages.values())(x), x) / 4).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for weights, grads in out:
        assert all(torch.equal(weight, state[name]) for name, weight in weights.items())
        assert grads.keys() == weights.keys()
        assert all((grad - expected[name]).abs().max() < 1e-14 for name, grad in grads.items())


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_weight_in_two_mirrored_stages_on_four_ranks(by_hand):
    """The mirrors add first; then the two pairs of ranks add theirs, and each half counts once."""
    program, batch = build("dualpipe", 4, 8), make_batch(8)
    stages = [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]
    stages[1].load_state_dict(stages[0].state_dict())
    names = {0: "weight", 1: "weight"}

    def fn(rank, world_size):
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        runtime = PipelineRuntime(program, mine, nn.functional.mse_loss, LIKE, sum_copies=not by_hand)
        runtime.step(*batch)
        if by_hand:
            with pytest.raises(ValueError, match=r"whose gradients come first; .* before sum_tied"):
                runtime.sum_tied(names)
            runtime.sum_copies()
        runtime.sum_tied(names)
        return {stage: grads_of(module) for stage, module in mine.items()}

    found = lab.launch(fn, 4, output="collect")
    stages[1].weight = stages[0].weight
    for x, y in zip(*batch, strict=True):
        (functional.mse_loss(nn.Sequential(*stages)(x), y) / 8).backward()
    for grads in found:
        for stage, ours in grads.items():
            close(ours, grads_of(stages[stage]))
            assert stage > 1 or torch.equal(ours[0], found[0][0][0])  # tied weights stay equal


class Output(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.weight = nn.Parameter(table.detach().clone())

    def forward(self, x):
        return x @ self.weight.t()


def tied_stages(last):
    """An embedding, linear layers and the output layer `last`, which has a copy of the embedding's table."""
    torch.manual_seed(0)
    stages = [nn.Embedding(5, WIDTH, sparse=True), *(nn.Linear(WIDTH, WIDTH) for _ in range(last - 1))]
    stages = [stage.double() for stage in stages]
    return [*stages, Output(stages[0].weight)]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble_h1", "zbv", "dualpipe"])
def test_tied_weights_are_summed_over_several_steps(name):
    """What an earlier step has summed over copies, or over tied weights, counts once."""
    program = build(name, 2, 4)
    last = program.num_stages - 1
    stages = tied_stages(last)
    steps = [[torch.randint(5, (3,)) for _ in range(4)] for _ in range(3)]

    def fn(rank, world_size):
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        sgd = torch.optim.SGD([p for stage in mine.values() for p in stage.parameters()], lr=0.1)
        runtime = PipelineRuntime(program, mine, nn.functional.cross_entropy)
        for set_to_none in (True, False):
            for tokens in steps:
                runtime.step(tokens, tokens)
                runtime.sum_tied({0: "weight", last: "weight"})
            sgd.step()
            found = {stage: [g.clone() for g in grads_of(module)] for stage, module in mine.items()}
            sgd.zero_grad(set_to_none)
        return found, {stage: [*module.parameters()] for stage, module in mine.items()}

    out = lab.launch(fn, 2)
    stages[-1].weight = stages[0].weight
    model = nn.Sequential(*stages)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        sgd.zero_grad()
        for x in (x for tokens in steps for x in tokens):
            (functional.cross_entropy(model(x), x) / 4).backward()
        sgd.step()
    tables = [weights[stage][0] for _, weights in out for stage in (0, last) if stage in weights]
    assert all(torch.equal(table, tables[0]) for table in tables)  # equal weights stay equal
    for grads, weights in out:
        for stage in grads:
            close(grads[stage], grads_of(stages[stage]))
            close(weights[stage], [*stages[stage].parameters()])
