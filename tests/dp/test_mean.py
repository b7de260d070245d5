"""What a user of torch writes without any scale: a mean over data ranks, under every stage and in a pipeline."""

from itertools import product

import pytest
import torch
from models import launch, worst
from torch import nn
from zero_runs import STAGES

import dualpipe_lab as lab
from dualpipe_lab.dp.sharded import full_gradients, full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.ep import ExpertParallel, Experts, MoE, TopKRouter
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime.runtime import PipelineRuntime

STEPS, M, ROWS = 3, 4, 8


def parts(number=2):
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(5, width), nn.Tanh()).double() for width in (5, 5, 5, 7)]
    return layers if number == 4 else [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]


def batch(step, data_rank):
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    x, y = torch.randn(ROWS, 5, dtype=torch.float64, generator=generator), torch.arange(ROWS) % 7
    y[: 1 + 2 * data_rank] = -100  # the microbatches have unequal counts, and one of data rank 1 has none
    return x, y


def flat(name, program):
    """The name in the model of two parts, of a weight in two or four stages."""
    stage, rest = name.split(".", 1)
    return name if program.num_stages == 2 else f"{int(stage) // 2}.{int(stage) % 2}.{rest}"


def settings():
    return {"lr": 0.1, "momentum": 0.9}  # not Adam, which divides a wrong factor out


def torchs(num_data_ranks):
    """The weights after torch's DistributedDataParallel, and its clipped norms."""

    def fn(rank, world_size):
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*parts()))
        optimizer, norms = torch.optim.SGD(model.parameters(), **settings()), []
        for step in range(STEPS):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
        return {name: p.detach() for name, p in model.module.named_parameters()}, norms

    return launch(fn, num_data_ranks)[0]


IN_CPP = "torch's DistributedDataParallel makes its buckets in C++, where the stand-in marks nothing"


@pytest.mark.on_gloo(IN_CPP)
@pytest.mark.parametrize("nodes", [0, 2])
def test_a_loop_without_any_scale_equals_torchs_ddp(nodes):
    """Also sharded within nodes; the sum is that many times the mean."""
    size = 2 * nodes or 3
    topology = lab.Topology([("dp", size)], **({"ranks_per_node": nodes} if nodes else {}))

    def fn(rank, world_size):
        found = {}
        for stage, reduce in product(STAGES[1:] if nodes else STAGES, ("mean", "sum")):
            model, norms = nn.Sequential(*parts()), []
            options = {} if reduce == "mean" else {"reduce": reduce}
            mesh = lab.Mesh(topology)
            optimizer = stage(model, mesh, optimizer=torch.optim.SGD, hybrid=bool(nodes), **options, **settings())
            for step in range(STEPS):
                x, y = batch(step, rank)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                (loss / world_size if options else loss).backward()
                norms.append(optimizer.step(max_norm=0.3).norm)
            found[stage.__name__, reduce] = full_weights(optimizer), norms
        return found

    weights, norms = torchs(size)
    for case, (ours, our_norms) in launch(fn, size)[0].items():
        assert worst(ours, weights) < 1e-14, case
        assert our_norms == pytest.approx(norms, rel=1e-13), case


@pytest.mark.on_gloo(IN_CPP)
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe", "dualpipev"])
def test_a_pipeline_with_data_ranks_equals_torchs_ddp(schedule):
    """`runtime.step(x, y)` and nothing else, with unequal counts of targets and a microbatch without any."""
    program = schedules.build(schedule, 2, M)

    def fn(rank, world_size):
        mesh, found = lab.Mesh(lab.Topology([("pp", 2), ("dp", 2)])), {}
        for stage in STAGES:
            whole = parts(program.num_stages)
            here = program.stages_of(mesh.rank("pp"))
            stages = nn.ModuleDict({str(index): whole[index] for index in here})
            optimizer = stage(stages, mesh, optimizer=torch.optim.SGD, program=program, **settings())
            runtime = PipelineRuntime(program, stages, nn.functional.cross_entropy, group=mesh.group("pp"))
            norms = []
            for step in range(STEPS):
                optimizer.zero_grad()
                runtime.step(*batch(step, mesh.rank("dp")))
                norms.append(optimizer.step(max_norm=0.3).norm)
            found[stage.__name__] = {flat(name, program): p for name, p in full_weights(optimizer).items()}, norms
        return found

    weights, norms = torchs(2)
    for found in launch(fn, 4):
        for case, (ours, our_norms) in found.items():
            assert max(float((p - weights[name]).abs().max()) for name, p in ours.items()) < 1e-14, case
            assert our_norms == pytest.approx(norms, rel=1e-13), case


def test_shares_that_are_divided_by_the_data_ranks_as_well_are_refused():
    def fn(rank, world_size):
        mesh, shares = lab.Mesh(lab.Topology([("dp", 2), ("pp", 1)])), [1 / (2 * M)] * M
        for make, reduce in product(STAGES[:3], ("sum", "mean")):  # ZeRO-3 is not told how many calls make a step
            stage = parts()[0]
            optimizer = make(stage, mesh.group("dp"), reduce=reduce)
            program = schedules.build("gpipe", 1, M)
            runtime = PipelineRuntime(program, [stage], lambda y, t: y.mean(), group=mesh.group("pp"))
            if reduce == "sum":
                runtime.step(*batch(0, rank), weights=shares)
                optimizer.step()
                continue
            with pytest.raises(ValueError, match="add up to 1 / 2, and the optimizer averages over 2 data ranks once"):
                runtime.step(*batch(0, rank), weights=shares)

    launch(fn, 2)


def test_experts_are_averaged_over_all_ranks_whose_tokens_reach_them():
    def make(ep=None):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), MoE(TopKRouter(4, 4, 2), Experts(4, 4, 4, ep=ep))).double()

    xs = torch.randn(4, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def one_process(rank, world_size):
        model = make()
        model(xs.flatten(0, 1)).square().mean().backward()
        return model.state_dict(), {name: p.grad for name, p in model.named_parameters()}

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("dp", 2), ("ep", 2)]))
        experts = slice(2 * mesh.rank("ep"), 2 * mesh.rank("ep") + 2)
        mine, right = ({n: v[experts] if "experts" in n else v for n, v in part.items()} for part in (state, grads))
        model = make(ExpertParallel(mesh.group("ep")))
        with pytest.raises(
            ValueError, match="is sharded along ep, and a mean is over all ranks whose tokens come here"
        ):
            Zero1(model[1].experts, mesh.group("dp"))
        found = []
        for stage in STAGES:
            model = make(ExpertParallel(mesh.group("ep")))
            model.load_state_dict(mine)
            optimizer = stage(model, mesh)
            model(xs[rank]).square().mean().backward()
            found.append(worst(full_gradients(optimizer), right))
        return found

    state, grads = launch(one_process, 1)[0]
    assert all(max(found) < 1e-14 for found in launch(fn, 4))


def test_another_word_than_mean_or_sum_is_refused():
    def fn(rank, world_size):
        for stage in STAGES:
            with pytest.raises(ValueError, match='"mean" or their "sum", got reduce=\'avg\''):
                stage(nn.Linear(2, 2), reduce="avg")

    launch(fn, 1)
